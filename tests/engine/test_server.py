# SPDX-License-Identifier: Apache-2.0
"""SGLang's HTTP server from the command line: streams, and a client that hangs up."""

import http.client
import json
import threading

import pytest
import requests
from cases import CHAIN, MAX_NEW_TOKENS, PROMPTS, TREE
from harness import speculation
from server import ForkedServer, LaunchedServer

pytestmark = pytest.mark.engine

LONG = 3000  # tokens; takes seconds, so a request that ends early was aborted


SWITCHING = {"SPECFUSED_MODE": "schedule:1100001110"}
SERVERS = {
    "plain": (None, {}),
    "chain": (CHAIN, {}),
    "tree": (TREE, {}),
    "switching": (TREE, {**SWITCHING, "STANDINS_OVERLAP": "1"}),
}


@pytest.fixture(scope="module", params=SERVERS)
def server(request, models):
    setting, env = SERVERS[request.param]
    engine_args = speculation(models, *setting) if setting else {}
    with ForkedServer(models, env, context_length=3500, **engine_args) as running:
        yield running


def body(prompt, max_new_tokens):
    return {
        "input_ids": prompt,
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens},
    }


def events(lines):
    """The JSON payloads of a server-sent event stream."""
    for line in lines:
        text = line.decode().strip()
        if text.startswith("data:") and text != "data: [DONE]":
            yield json.loads(text.removeprefix("data:"))


def stream(server, prompt):
    """Tokens of a streamed request and the number of events that brought them."""
    answer = requests.post(
        f"{server.url}/generate", json=body(prompt, MAX_NEW_TOKENS), stream=True, timeout=60
    )
    assert answer.status_code == 200
    parts = list(events(answer.iter_lines()))
    return parts[-1]["output_ids"], len(parts)


def hang_up_midway(server, prompt):
    """Read two events of a long answer, then close the connection."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/generate", json.dumps(body(prompt, LONG)), headers)
    received = events(connection.getresponse())
    for _ in range(2):
        last = next(received)
    connection.close()
    return last["meta_info"]["completion_tokens"]


def test_streams_side_by_side(server, plain):
    answers = {}

    def ask(i):
        answers[i] = stream(server, PROMPTS[i])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [answers[i][0] for i in range(len(PROMPTS))] == plain.tokens
    assert min(count for _, count in answers.values()) > 1
    assert sum(server.probe.counts().values()) > 0


def test_client_that_hangs_up(server, plain):
    """The request ends, its slots come back, and the next one is served as ever."""
    assert hang_up_midway(server, PROMPTS[2]) < LONG // 2
    assert server.load()[0] <= 1
    server.wait_until(lambda: server.load()[0] == 0, "end of the aborted request", 5)
    assert stream(server, PROMPTS[0])[0] == plain.tokens[0]
    # The idle scheduler checks its books and dies of a leak; flushing leaves no slot in use.
    server.wait_until(lambda: requests.post(f"{server.url}/flush_cache").ok, "empty cache", 10)
    server.wait_until(lambda: server.load() == (0, 0), "return of all slots", 10)
    assert stream(server, PROMPTS[1])[0] == plain.tokens[1]
    assert server.alive()


def test_launched_as_users_do(models, plain, tmp_path):
    """Own processes, no fork, no probe: the entry point alone brings the backend in."""
    stats = tmp_path / "stats.json"
    with LaunchedServer(models, stats, **speculation(models, *TREE)) as server:
        assert stream(server, PROMPTS[0])[0] == plain.tokens[0]
        phases = server.phases()
    assert phases["target.TARGET_VERIFY"] > 0
    assert phases["draft.DECODE"] > 0
