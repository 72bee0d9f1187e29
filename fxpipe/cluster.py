"""The network a plan is made for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cluster:
    """Equal links between all ranks, each direction on its own.

    Defaults: A100 with NVSwitch, 600 GB/s per GPU, half of it each way (NVIDIA A100 datasheet, 2021).
    """

    bandwidth_bytes_per_second: float = 300e9
    latency_seconds: float = 10e-6

    def __post_init__(self) -> None:
        if not self.bandwidth_bytes_per_second > 0 or not self.latency_seconds >= 0:
            raise ValueError(f"{self}: bandwidth must be positive and latency not negative")

    def transfer_seconds(self, num_bytes: float) -> float:
        """Seconds for one message; zero bytes are no message."""
        return self.latency_seconds + num_bytes / self.bandwidth_bytes_per_second if num_bytes else 0.0
