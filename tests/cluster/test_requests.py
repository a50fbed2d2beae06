"""What commands ask of supervisors through files: each request is served once, or withdrawn."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from relax_hpc.base.errors import DeadlineError
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.supervise import requests
from relax_hpc.cluster.supervise.requests import GroupRequest
from tests.helpers.queue_helpers import make_run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "run")


def test_requests_are_served_in_order_by_whom_they_concern_and_once(run: RunDir) -> None:
    assert requests.pending_requests(run, lambda _: True) == []
    asked = [
        requests.send_request(run, op, group)
        for op, group in (("restart", "actor"), ("release", "rollout"))
    ]
    assert (
        requests.pending_requests(run, lambda _: True)
        == asked
        == [GroupRequest(1, "restart", "actor"), asked[1]]
    )
    assert requests.pending_requests(run, lambda name: name == "rollout") == [asked[1]]
    requests.answer(run, asked[0], done="restart")
    assert requests.pending_requests(run, lambda _: True) == [asked[1]]
    assert requests.wait_for_answer(run, asked[0], 1.0) == {"done": "restart"}
    assert requests.send_request(run, "start", "rollout-2").number == 3, "answers take no numbers"


def test_an_answer_that_comes_later_is_waited_for(run: RunDir) -> None:
    asked = requests.send_request(run, "restart", "actor")
    supervisor = threading.Thread(target=lambda: requests.answer(run, asked, done="restart"))
    supervisor.start()
    assert requests.wait_for_answer(run, asked, 10.0) == {"done": "restart"}
    supervisor.join()


def test_a_request_that_nobody_answers_is_withdrawn(run: RunDir) -> None:
    asked = requests.send_request(run, "restart", "actor")
    with pytest.raises(DeadlineError, match="restart actor: no supervisor has answered"):
        requests.wait_for_answer(run, asked, 0.05)
    assert requests.pending_requests(run, lambda _: True) == []


def test_the_first_reason_to_stop_stays(run: RunDir) -> None:
    assert requests.read_stop_request(run) == {}
    requests.request_stop(run, 93, "actor: in circles")
    requests.request_stop(run)
    assert requests.read_stop_request(run) == {"code": 93, "reason": "actor: in circles"}
