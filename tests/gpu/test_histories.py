"""The histories of tests/pipeline/test_histories.py on GPUs, in little memory too."""

import pytest

cupy = pytest.importorskip("cupy")

from gpuscheduler import Scheduler
from gpuscheduler.devices.cuda import result_rooms
from tests.pipeline.test_histories import History, options

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("devices", ["cuda:0", pytest.param("cuda:0,1", marks=pytest.mark.gpus(2))])
def test_any_history(devices, seed, monkeypatch):
    monkeypatch.setattr(result_rooms, "LEAST_WHOLE", 0)
    elsewhere = Scheduler("cuda:0")
    history = History(seed, cupy.asarray, cupy.asnumpy, elsewhere)
    with Scheduler(devices, **options(seed)):
        for step in range(30):
            history.step()
            if step == 20:
                elsewhere.close()  # what it has persisted stays
                history.elsewhere = None
        for pair in history.pairs:
            history.compared(*pair)
