"""Plain torch implementations: what every faster kernel is compared with."""
