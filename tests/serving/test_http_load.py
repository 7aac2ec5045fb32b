"""The benchmarks' load over HTTP: nothing is lost, what is lost is named, and tokens have times."""

from benchmarks.http_load import describe_lost, drive
from benchmarks.load import Load
from tests.support.launchers import free_port
from tests.support.servers import KEY, MAX_MODEL_LEN, RunningServer


def load(*input_lens: int) -> Load:
    """Return requests that come one after the other, with 7 new tokens each."""
    arrival_times = [0.02 * index for index in range(len(input_lens))]
    return Load(arrival_times, [[1 + index] * num for index, num in enumerate(input_lens)], [7] * len(input_lens))


def test_nothing_is_lost(server: RunningServer) -> None:
    requests = load(16, 60, 16)
    answers = drive(server.url, requests, KEY, {"return_token_ids": True})
    assert describe_lost(answers) == ""
    assert [answer.arrival_time for answer in answers] == requests.arrival_times
    for answer in answers:
        assert (answer.num_tokens, len(answer.token_times)) == (7, 7)
        assert answer.first_token_time is not None
        assert answer.arrival_time < answer.first_token_time == answer.token_times[0]
        assert answer.token_times == sorted(answer.token_times)
        assert answer.token_times[-1] <= answer.finish_time


def test_what_is_lost(server: RunningServer) -> None:
    """A prompt too long for the server, a wrong key, and a server that is not there."""
    answers = drive(server.url, load(16, MAX_MODEL_LEN, 16), KEY)
    assert [bool(answer.error) for answer in answers] == [False, True, False]
    assert describe_lost(answers).startswith("1 of 3 are lost: 1 x status 400")
    answers = drive(server.url, load(16, 16, 16), "wrong")
    assert describe_lost(answers).startswith("3 of 3 are lost: 3 x status 401")
    answers = drive(f"http://localhost:{free_port()}", load(16, 16), KEY)
    assert [answer.num_tokens for answer in answers] == [0, 0]
    assert describe_lost(answers).startswith("2 of 2 are lost: ")
