"""Training of the embedded `nano` checkpoint: corpus, generated tasks, differentiable twin, draft, export."""
