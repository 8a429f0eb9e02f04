from .._device import OutOfMemoryError  # noqa: F401
