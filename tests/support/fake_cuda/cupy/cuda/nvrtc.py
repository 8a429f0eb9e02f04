"""No compiler: what is 'compiled' is the source (tests/gpu/conftest.py)."""


class NVRTCError(RuntimeError):
    pass


def getVersion():
    return 13, 0
