"""`twell info`"""

from __future__ import annotations

EXAMPLE = "twell info"


def command() -> None:
    """Show versions, devices, and which backends can be used here."""
    import torch

    from twell import __version__, results
    from twell.sparse import layer

    versions = ", ".join(f"{name} {version}" for name, version in results.versions().items())
    print(f"twell {__version__}, commit {results.commit()}")
    print(f"versions: {versions}")
    print(f"device: {results.device_name()}")
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        memory = f"{gpu.total_memory / 2**30:.0f} GiB"
        print(f"  cuda:{number}: {gpu.name}, {memory}, sm_{gpu.major}{gpu.minor}")
    for backend, reason in layer.backend_status().items():
        print(f"backend {backend}: {'on' if reason is None else 'off: ' + reason}")
