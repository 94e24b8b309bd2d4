"""Which vision encoder gets an image: the one that has its embedding first."""

from __future__ import annotations

from deepinfer.balancers.decision import Decision
from deepinfer.balancers.encoder_fleet import EncoderCost, EncoderFleet, ImageTask

__all__ = ["EncoderBalancer"]


class EncoderBalancer:
    """Routes images to encoders by the time at which the embedding will be there.

    Encoding costs time by patches, so the queue of a worker is counted in seconds, not in images: the running batch, what
    waits, and the image itself. A worker that has the image already, or is about to, needs no time of its own for it. It
    is chosen as long as the embedding is there no later than another worker could make it: the affinity is bounded by
    the wait, and a popular image cannot pile everything up on one worker.

    Args:
        cost: Seconds by patches.

    Examples:
        >>> fleet = EncoderFleet(["a", "b"])
        >>> balancer = EncoderBalancer(EncoderCost(patch_s=1e-4))
        >>> cat, dog = ImageTask("r1", "cat", 4_000), ImageTask("r2", "dog", 1_000)
        >>> for image in (cat, dog):
        ...     fleet.send(balancer.decide(image, fleet, 0.0).target, image, 0.0)
        >>> balancer.decide(ImageTask("r3", "bird", 1_000), fleet, 0.0)
        Decision(target=1, reason='least_work', predicted=0.2)
        >>> balancer.decide(ImageTask("r4", "dog", 1_000), fleet, 0.0)
        Decision(target=1, reason='same_image', predicted=0.1)
    """

    def __init__(self, cost: EncoderCost) -> None:
        self.cost = cost

    def decide(self, image: ImageTask, fleet: EncoderFleet, now_s: float) -> Decision:
        """Chooses a worker; changes nothing (`EncoderFleet.send` does).

        Args:
            image: What is to be encoded.
            fleet: The workers.
            now_s: The time in seconds.

        Returns:
            The choice; `predicted` is in how many seconds the embedding is there. Reasons: `"ready"`, `"same_image"`,
            `"least_work"`, and without a target `"no_worker_ready"` or `"no_room"`. Ties go to the worker that has the
            image, then to the lower index.
        """
        best: tuple[float, bool, int] | None = None
        reason = "no_worker_ready"
        for worker in range(len(fleet)):
            if not fleet.is_ready(worker):
                continue
            has = fleet.find(worker, image.media_hash)
            if has is None and fleet.free_tokens(worker) < image.tokens:
                if best is None:
                    reason = "no_room"
                continue
            found = (self._seconds(worker, image, has, fleet, now_s), has is None, worker)
            if best is None or found < best:
                best = found
                reason = {None: "least_work", "ready": "ready"}.get(has, "same_image")
        if best is None:
            return Decision(None, reason)
        return Decision(best[2], reason, best[0])

    def _seconds(
        self, worker: int, image: ImageTask, has: str | None, fleet: EncoderFleet, now_s: float
    ) -> float:
        if has == "ready":
            return 0.0
        seconds = fleet.busy_s(worker, now_s)
        if has == "running":
            return seconds
        if has == "waiting":
            images, patches = fleet.ahead(worker, image.media_hash)
        else:
            images, patches = fleet.waiting(worker)
            images, patches = images + 1, patches + image.patches
        return seconds + self.cost.seconds(patches, -(-images // fleet.batch_images))
