# SPDX-License-Identifier: Apache-2.0
"""SGLang's HTTP server, started from command-line arguments in either of two ways."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import requests
from harness import ENGINE_ARGS, FORK, STOCK_WORKER, EngineDied, child, end
from probes import OpProbe


class Server:
    """A server on a free port of this machine, ready when the `with` block begins."""

    start_timeout = 90

    def __init__(self, models, **engine_args):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        options = {**ENGINE_ARGS, "model_path": str(models / "target"), "port": self.port}
        self.argv = []
        for name, value in {**options, **engine_args}.items():
            self.argv.append("--" + name.replace("_", "-"))
            if value is not True:
                self.argv.append(str(value))

    def __enter__(self):
        self.start()
        try:
            self.wait_until(self._healthy, "health", self.start_timeout)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error):
        self.stop()

    def _healthy(self):
        try:
            return requests.get(f"{self.url}/health", timeout=5).status_code == 200
        except (requests.ConnectionError, requests.Timeout):
            return False

    def load(self):
        """Running requests and used KV slots, as the scheduler reports them."""
        (entry,) = requests.get(f"{self.url}/v1/loads", timeout=5).json()["loads"]
        return entry["num_running_reqs"], entry["num_used_tokens"]

    def wait_until(self, condition, what, timeout):
        """Poll until `condition()`; fail at once when the server has ended."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if not self.alive():
                raise EngineDied(f"the server ended before {what}")
            if condition():
                return
            time.sleep(0.05)
        raise TimeoutError(f"no {what} after {timeout} s")


def _serve(probe, argv):
    probe.install()
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()  # as sglang.launch_server: before the command line is parsed
    launch_server(prepare_server_args(argv))


class ForkedServer(Server):
    """A child of this process: up in a second, calls counted; `env` is set in the child only."""

    def __init__(self, models, env=None, **engine_args):
        super().__init__(models, **engine_args)
        self.env = {**STOCK_WORKER, **(env or {})}

    def start(self):
        self.probe = OpProbe()
        self.result, theirs = FORK.Pipe(duplex=False)
        self.process = FORK.Process(
            target=child, args=(theirs, self.env, _serve, (self.probe, self.argv))
        )
        self.process.start()
        theirs.close()

    def alive(self):
        return self.process.is_alive()

    def stop(self):
        end(self.process)


class LaunchedServer(Server):
    """`python -m sglang.launch_server`, as users start it: every process loads the plugin anew."""

    start_timeout = 300  # several imports of everything, 15 s on idle cores

    def __init__(self, models, stats, **engine_args):
        super().__init__(models, **engine_args)
        self.stats = stats

    def start(self):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", *self.argv],
            cwd=self.stats.parent,
            env={**os.environ, "SPECFUSED_STATS": str(self.stats)},
            start_new_session=True,
        )

    def alive(self):
        return self.process.poll() is None

    def stop(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def phases(self):
        """Attention calls by role and forward mode, by the backend's own count."""
        return json.loads(self.stats.read_text())["calls"]
