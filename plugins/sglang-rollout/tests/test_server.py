"""Options and their check, and the life of a server process; a small program stands in for SGLang."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from miles_core.component import Environment
from miles_core.errors import ConfigError, EngineFailed, RuntimeMissing, WorkerDied
from miles_sglang_rollout import SglangEngineConfig, miles_engines
from miles_sglang_rollout.arguments import (
    Installed,
    argument_names,
    check_arguments,
    check_environment,
    first_gpu,
    gpus_of,
    installed,
    server_arguments,
    server_environment,
)
from miles_sglang_rollout.server import Server, hold_port, last_errors

pytestmark = pytest.mark.timeout(60)
FOUND = Installed("python", "0.5.17", ("tp_size", "mem_fraction_static", "enable_memory_saver", "model_path", "port"))


# --- Options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"tp_sise": 2}, 'SGLang 0.5.17 has no argument "tp_sise"; did you mean "tp_size"?'),
        ({"mem-fraction-static": 0.5}, 'did you mean "mem_fraction_static"?'),
        ({"model_path": "x"}, "engine.sglang.server_args.model_path is set by Miles itself"),
        ({"enable_return_routed_experts": True}, "The run needs it; install a version that has it."),
    ],
)
def test_arguments_are_checked_against_the_installed_version(args: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        check_arguments(args, FOUND, "engine.sglang")
    check_arguments({"tp_size": 2, "enable_memory_saver": True}, FOUND, "engine.sglang")


def test_argument_names_are_read_from_the_source() -> None:
    source = "class Other:\n    a: int = 1\nclass ServerArgs:\n    '''doc'''\n    tp_size: A[int, 'h'] = 1\n    b = 2\n"
    assert argument_names(source) == ("tp_size",)
    with pytest.raises(RuntimeMissing, match="no class ServerArgs"):
        argument_names("x = 1")


def test_an_interpreter_without_sglang_says_what_to_do(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho '[[], \"\", []]'\n")
    python.chmod(0o755)
    with pytest.raises(RuntimeMissing, match=r"needs SGLang, and .*/python has none[\s\S]*engine\.python"):
        installed(str(python))
    with pytest.raises(RuntimeMissing, match="no program here"):
        installed(str(tmp_path / "nothing"))


def test_a_wrong_model_folder_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles_sglang_rollout.arguments.installed", lambda python: FOUND)
    with pytest.raises(ConfigError, match=r"has no config\.json \(model\.path\)"):
        check_environment(SglangEngineConfig(), Environment(model_path=tmp_path))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"urls": ("http://x",), "server_args": {"tp_size": 2}}, "urls name servers that run already"),
        ({"urls": ("http://x",), "control_urls": (("http://y",), ("http://z",))}, "one for each"),
        ({"max_in_flight": 0}, "greater than 0"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        SglangEngineConfig(**options)


def test_capabilities_follow_the_servers_arguments() -> None:
    (component,) = miles_engines()
    args = {"enable_memory_saver": True, "enable_return_routed_experts": True, "enable_deterministic_inference": True}
    more = component.provided(SglangEngineConfig(server_args=args)) - component.provided(SglangEngineConfig())
    assert more == {"sleep", "fields/routed_experts", "seed"}
    assert "weights/ipc" not in component.provided(SglangEngineConfig(urls=("http://x",)))


def test_gpus_are_those_of_all_ranks() -> None:
    def gpus(**args: Any) -> float:
        return gpus_of(SglangEngineConfig(device="cuda", server_args=args))

    assert (gpus(), gpus(tp_size=4, pp_size=2), gpus(tp_size=2, dp_size=3)) == (1.0, 8.0, 6.0)
    assert gpus(tp_size=4, dp_size=4, enable_dp_attention=True) == 4.0  # the same four
    assert gpus_of(SglangEngineConfig(device="cpu", server_args={"tp_size": 4})) == 0.0


@pytest.mark.parametrize(
    ("index", "gpus", "visible", "first"),
    [(0, 1, 8, 0), (3, 1, 8, 3), (1, 4, 8, 4), (2, 4, 8, 0), (1, 1, 1, 0), (5, 2, 2, 0), (0, 1, 0, 0)],
)
def test_replicas_lie_side_by_side_on_the_gpus(index: int, gpus: int, visible: int, first: int) -> None:
    """The last but one is a worker that sees its own two GPUs alone."""
    assert first_gpu(index, gpus, visible) == first


def test_the_users_arguments_come_last(tmp_path: Path) -> None:
    config = SglangEngineConfig(server_args={"max_total_tokens": 99, "dtype": "bfloat16"})
    args = server_arguments(config, model=tmp_path, port=5, cpu=True, seed=3, tokenizer=False)
    assert (args["max_total_tokens"], args["dtype"], args["device"], args["port"]) == (99, "bfloat16", "cpu", 5)
    gpu = server_arguments(SglangEngineConfig(), model=tmp_path, port=5, cpu=False, seed=3, tokenizer=True)
    assert (gpu["dtype"], gpu["skip_tokenizer_init"], "attention_backend" in gpu) == ("bfloat16", False, False)


def test_stand_ins_are_on_the_path_only_where_packages_are_missing() -> None:
    config = SglangEngineConfig(num_threads=3, env={"X": "y"})
    bare = server_environment(config, Installed("p", "1", (), ("sgl_kernel",)), cpu=True)
    assert [p for p in bare["PYTHONPATH"].split(os.pathsep) if "standins" in p] == [
        str(Path(__file__).parents[1] / "miles_sglang_rollout/serverside/standins/sgl_kernel")
    ]
    assert (bare["OMP_NUM_THREADS"], bare["X"], bare["SGLANG_USE_CPU_ENGINE"]) == ("3", "y", "1")
    gpu = server_environment(config, Installed("p", "1", (), ("sgl_kernel",)), cpu=False)
    assert "standins" not in gpu["PYTHONPATH"] and "SGLANG_USE_CPU_ENGINE" not in gpu


def test_engine_python_is_the_servers_and_asks_for_no_worker() -> None:
    """Otherwise the other environment would need Miles."""
    from miles_core.launch import role_specs

    def specs(**engine: Any) -> list[str]:
        table = SimpleNamespace(**{"process": False, "python": None, "replicas": 2, "use": "sglang", **engine})
        trainer = SimpleNamespace(num_workers=1, process=False, use="toy")
        (component,) = miles_engines()
        selection = SimpleNamespace(component=component, options=SglangEngineConfig(device="cpu"))
        run = SimpleNamespace(config=SimpleNamespace(engine=table, trainer=trainer), one=lambda kind: selection)
        return [(spec.name, spec.python) for spec in role_specs(run)]

    assert specs(python="/env/bin/python") == []
    assert specs(python="/env/bin/python", process=True) == [("engine", None)]


# --- Process ---------------------------------------------------------------------------------------------------------

STUB = """
import http.server, json, os, sys, time
args = json.load(open(sys.argv[1]))
mode = os.environ.get("STUB", "")
print("Load weight begin", flush=True)
if mode == "dies":
    print("Traceback ...\\nValueError: Unrecognized model in /nowhere", flush=True)
    sys.exit(3)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"weight_version": "default", "tp_size": 1, "context_length": 50}).encode()
        self.send_response(200); self.end_headers(); self.wfile.write(body)
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body.get("sampling_params", {}).get("max_new_tokens", 0) > 20:
            time.sleep(60)
        out = {"meta_info": {"finish_reason": {"type": "length"}, "output_token_logprobs": [[-1.0, 5, None]]}}
        self.send_response(200); self.end_headers(); self.wfile.write(json.dumps(out).encode())
    def log_message(self, *args): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", args["port"]), Handler)
print("Uvicorn running", flush=True)
server.serve_forever()
"""


@pytest.fixture
def stub(tmp_path: Path) -> dict[str, str]:
    """Environment in which the stand-in is what a server runs."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "miles_sglang_server.py").write_text(STUB)
    return {**os.environ, "PYTHONPATH": str(tmp_path / "path")}


def engine(tmp_path: Path, stub: dict[str, str], monkeypatch: pytest.MonkeyPatch, **more: Any) -> Any:
    pytest.importorskip("aiohttp")
    from miles_sglang_rollout.engine import SglangEngine

    monkeypatch.setattr("miles_sglang_rollout.life.installed", lambda python: Installed(sys.executable, "0", ()))
    monkeypatch.setattr("miles_sglang_rollout.life.server_environment", lambda *rest: {**stub, **more})
    config = SglangEngineConfig(device="cpu", start_timeout_s=20, control_timeout_s=5)
    (tmp_path / "model").mkdir(exist_ok=True)
    return SglangEngine(tmp_path / "model", config, run_dir=tmp_path)


def request(count: int = 1) -> Any:
    import numpy as np

    from miles_core.types import GenerateRequest, SamplingParams

    params = SamplingParams(max_new_tokens=count)
    return GenerateRequest(id="r", token_ids=np.array([1], np.int32), params=params, seed=1)


def test_a_server_that_does_not_start_says_why(
    tmp_path: Path, stub: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        await engine(tmp_path, stub, monkeypatch, STUB="dies").start()

    with pytest.raises(EngineFailed) as caught:
        asyncio.run(work())
    said = str(caught.value)
    assert "did not start" in said and "exit code 3" in said
    assert "ValueError: Unrecognized model in /nowhere" in said and "logs/engine-0-server.log" in said


def test_progress_is_told_while_it_starts(
    tmp_path: Path, stub: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        made = engine(tmp_path, stub, monkeypatch)
        await made.start()
        await made.close()

    with caplog.at_level(logging.INFO):
        asyncio.run(work())
    text = caplog.text
    assert "engine-0: loading weights after" in text and "engine-0: listening after" in text
    assert "engine-0-server.log" in text


def test_a_killed_server_fails_its_requests_and_can_be_started_again(
    tmp_path: Path, stub: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> Any:
        made = engine(tmp_path, stub, monkeypatch)
        await made.start()
        first = made.incarnation
        task = asyncio.ensure_future(made.generate(request(30)))
        await asyncio.sleep(0.2)
        os.kill(made.life.server.pid, signal.SIGKILL)
        with pytest.raises(EngineFailed, match=r"server is gone[\s\S]*SIGKILL; the system does this when memory runs out"):
            await task
        with pytest.raises(WorkerDied, match="server is gone"):  # what the pool buries a member for
            await made.health()
        again = await made.restart()
        await again.start()
        answer = await again.generate(request())
        await again.close()
        return first != again.incarnation, answer.token_ids.tolist()

    assert asyncio.run(work()) == (True, [5])


def test_closing_leaves_no_process_behind(tmp_path: Path, stub: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> int:
        made = engine(tmp_path, stub, monkeypatch)
        await made.start()
        pid = made.life.server.pid
        await made.close()
        return pid

    with pytest.raises(ProcessLookupError):
        os.kill(asyncio.run(work()), 0)


def test_a_server_ends_with_whoever_started_it(tmp_path: Path) -> None:
    """Killed without a chance to clean up."""
    from miles_sglang_rollout.arguments import SERVERSIDE

    child = "import sys; sys.path.insert(0, sys.argv[1]); import miles_sglang_server as m, time; m.die_with_parent(); "
    child += "print('up', flush=True); time.sleep(60)"
    parent = f"import subprocess, sys, time\np = subprocess.Popen([sys.executable, '-c', {child!r}, {str(SERVERSIDE)!r}])\n"
    parent += "print(p.pid, flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    lines = {process.stdout.readline().strip(), process.stdout.readline().strip()}
    pid = int(next(line for line in lines if line.isdigit()))
    assert "up" in lines
    process.kill()
    process.wait()
    for _ in range(100):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("it outlived its parent")


def test_a_held_port_is_free_for_the_server_alone() -> None:
    holder = hold_port()
    port = holder.getsockname()[1]
    with socket.socket() as plain, pytest.raises(OSError, match="in use"):
        plain.bind(("127.0.0.1", port))  # whoever asks for it without SO_REUSEADDR
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        holder.close()
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass


def test_a_port_that_is_taken_all_the_same_is_named(tmp_path: Path) -> None:
    server = Server("engine-0", tmp_path, logging.getLogger("test"))
    server.log_file.parent.mkdir(parents=True)
    server.log_file.write_text("OSError: [Errno 98] error while attempting to bind: address already in use\n")
    server._process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    server._process.wait()
    assert "cause: its port was taken" in server.reason()


def test_the_last_errors_of_a_log_are_found() -> None:
    log = """[2026-11-29 17:00:46] INFO: all well
  File "x.py", line 3
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB
[2026-11-29 17:00:46] RuntimeError: second
RuntimeError: second
some Error in the middle: no"""
    assert last_errors(log) == [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        "RuntimeError: second",
    ]
