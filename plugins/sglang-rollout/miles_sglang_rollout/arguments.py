"""What an SGLang server is started with: defaults for the device, the user's own arguments, and their check against the
installed version - by reading its source, since importing SGLang takes longer than everything else before a start."""

from __future__ import annotations

import ast
import difflib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from miles_core.component import Environment
from miles_core.errors import ConfigError, RuntimeMissing
from miles_core.placement import visible_gpus
from miles_sglang_rollout import SglangEngineConfig

SERVERSIDE = Path(__file__).parent / "serverside"
STANDINS = SERVERSIDE / "standins"
LOADER = "miles_sglang_weights.load"
OURS = ("model_path", "port", "nnodes", "node_rank", "dist_init_addr", "custom_weight_loader")
"""What Miles sets itself, or what one replica of one machine cannot have."""
SWITCHED = ("enable_return_routed_experts", "enable_memory_saver", "enable_deterministic_inference")
CPU_ARGS: dict[str, Any] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "dtype": "float32",
    "mem_fraction_static": 0.2,
    "max_total_tokens": 16384,
    "max_running_requests": 64,
    "skip_server_warmup": True,
}
"""What SGLang was seen to need on the CPU without its kernel package. Without dtype it makes fp16 of an fp32 checkpoint."""
_PROBE = """
import importlib.metadata as m, importlib.util as u, json
s = u.find_spec("sglang")
def version():
    try: return m.version("sglang")
    except Exception: return ""
lacks = [n for n in ("sgl_kernel", "torchvision") if u.find_spec(n) is None]
print(json.dumps([list(s.submodule_search_locations) if s else [], version(), lacks]))
"""


@dataclass(frozen=True, slots=True)
class Installed:
    """An SGLang installation: the interpreter, its version, its arguments, and which of the packages that it imports and a
    CPU can do without are not there."""

    python: str
    version: str
    names: tuple[str, ...]
    lacks: tuple[str, ...] = ()


@lru_cache
def installed(python: str) -> Installed:
    """What the environment of `python` has. Raises RuntimeMissing when that is no SGLang."""
    program = shutil.which(python)
    if program is None:
        raise RuntimeMissing(f"{python} is no program here (engine.python)")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([program, "-c", _PROBE], capture_output=True, text=True, timeout=120, env=env)
    try:
        folders, version, lacks = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = done.stderr.strip().splitlines()[-1:] or ["nothing"]
        raise RuntimeMissing(f"{python} could not be asked for its sglang; it said: {said[0]}") from None
    source = next((f for f in (Path(p) / "srt" / "server_args.py" for p in folders) if f.is_file()), None)
    if source is None:
        raise RuntimeMissing(
            f"the engine sglang needs SGLang, and {program} has none",
            "install it there, or name another environment's interpreter: engine.python",
        )
    return Installed(program, version, argument_names(source.read_text("utf-8")), tuple(lacks))


def argument_names(source: str) -> tuple[str, ...]:
    """Fields of the class ServerArgs in a version's server_args.py."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == "ServerArgs":
            fields = (n.target for n in node.body if isinstance(n, ast.AnnAssign))
            return tuple(f.id for f in fields if isinstance(f, ast.Name))
    raise RuntimeMissing("this SGLang has no class ServerArgs in srt/server_args.py; its version is not understood")


def check_environment(config: SglangEngineConfig, environment: Environment) -> None:
    """Before anything is started: SGLang is there, its version knows every argument, and the options fit together."""
    run = environment.run_config
    replicas = run.engine.replicas if run is not None else 1
    where = environment.where or "engine.sglang"
    if config.urls:
        if len(config.urls) != replicas:
            raise ConfigError(
                f"{where}.urls has {len(config.urls)} entries, and engine.replicas is {replicas}; one for each"
            )
        return
    python = (run.engine.python if run is not None else None) or sys.executable
    check_arguments(config.server_args, installed(python), where)
    folder = environment.model_path
    if folder is not None and not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is no Hugging Face folder: it has no config.json (model.path)")
    if run is not None and run.model.max_context and on_cpu(config):
        most = config.server_args.get("max_total_tokens", CPU_ARGS["max_total_tokens"])
        if most <= run.model.max_context:
            raise ConfigError(
                f"{where}.server_args.max_total_tokens is {most}, and model.max_context {run.model.max_context}: one "
                "answer would not fit into the server's cache"
            )


def check_arguments(args: Mapping[str, Any], found: Installed, where: str) -> None:
    """Raises ConfigError for names that this version does not have, with the nearest, and for those that Miles sets."""
    where = f"{where}.server_args"
    lines = []
    for name in args:
        if name in OURS:
            lines.append(f"{where}.{name} is set by Miles itself")
        elif name not in found.names:
            near = difflib.get_close_matches(name.replace("-", "_"), found.names, 1, 0.6)
            hint = f'; did you mean "{near[0]}"?' if near else ""
            needed = " The run needs it; install a version that has it." if name in SWITCHED else ""
            lines.append(f'{where}.{name}: SGLang {found.version} has no argument "{name}"{hint}{needed}')
    if lines:
        raise ConfigError(*lines, f"SGLang {found.version} ({found.python}) knows {len(found.names)} arguments")


def on_cpu(config: SglangEngineConfig, given: str = "auto") -> bool:
    if config.device != "auto":
        return config.device == "cpu"
    if given != "auto":
        return given == "cpu"
    return not visible_gpus(os.environ, Path("/dev"))


def gpus_of(config: SglangEngineConfig) -> float:
    """GPUs of one replica: tensor- times pipeline-parallel ranks, times data-parallel ones that are not attention's."""
    if config.urls or on_cpu(config):
        return 0.0
    args = config.server_args
    size = args.get("tp_size", 1) * args.get("pp_size", 1)
    return float(size if args.get("enable_dp_attention") else size * args.get("dp_size", 1))


def first_gpu(index: int, gpus: int, visible: int) -> int:
    """SGLang's `base_gpu_id` of replica `index`: replicas lie side by side on what this process sees, and start again at 0
    when that is used up. A worker of the launcher sees its own GPUs alone."""
    places = max(visible // max(gpus, 1), 1)
    return index % places * gpus


def server_arguments(
    config: SglangEngineConfig, *, model: Path, port: int, cpu: bool, seed: int, tokenizer: bool
) -> dict[str, Any]:
    """Everything that the server is started with, the user's own arguments last."""
    args: dict[str, Any] = {
        "model_path": str(model),
        "host": "127.0.0.1",
        "port": port,
        "random_seed": seed % (1 << 31),
        "skip_tokenizer_init": not tokenizer,
        "custom_weight_loader": [LOADER],
    }
    if config.stream:
        args["incremental_streaming_output"] = True
    if cpu:
        args |= {"device": "cpu", **CPU_ARGS}
    else:
        args["dtype"] = "bfloat16"  # SGLang's "auto" makes fp16 of an fp32 checkpoint
    args |= config.server_args
    if cpu:
        args.pop("enable_memory_saver", None)  # there is no device memory to give back
    return args


def server_environment(config: SglangEngineConfig, found: Installed, cpu: bool) -> dict[str, str]:
    """This process's environment with our server-side modules on the path, and stand-ins for SGLang's kernels on a CPU
    without them."""
    paths = [str(SERVERSIDE)]
    env = dict(os.environ)
    env.setdefault("SGLANG_TIMEOUT_KEEP_ALIVE", "75")
    if cpu:
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        env.setdefault("TORCHDYNAMO_DISABLE", "1")  # it would compile small functions with a C++ compiler, for minutes
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        paths += [str(STANDINS / name) for name in found.lacks]
    if config.num_threads:
        env["OMP_NUM_THREADS"] = str(config.num_threads)
    env["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [env.get("PYTHONPATH", "")])])
    return env | config.env
