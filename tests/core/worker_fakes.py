"""Small trainer ranks and engines for the tests of workers, trainers and transports; loaded by path in workers too."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from miles_core.errors import DataError, MilesError, RuntimeMissing
from miles_core.interfaces import EngineReplica, TrainerRank
from miles_core.transport import open_bucket
from miles_core.types import Bucket, Generation, RankInfo, StepReport, TensorSpec


class Unpicklable(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.file = open(os.devnull)  # noqa: SIM115 - what makes it impossible to pickle


class Plain:
    """Sync and async methods, faults of every sort."""

    def __init__(self, context, **options):
        self.context, self.options = context, options
        self.calls = []
        if options.get("fail") == context.index:
            raise RuntimeMissing("no such device", "buy one")
        if options.get("hang") == context.index:
            time.sleep(600)

    def who(self, *extra):
        return (self.context.role, self.context.index, self.context.world_size, self.options, extra)

    def environment(self, name):
        return os.environ.get(name)

    def rendezvous(self):
        return self.context.rendezvous

    def echo(self, value):
        return value

    def raise_data_error(self):
        raise DataError("row 3 is bad", "fix it")

    def raise_value_error(self, text):
        raise ValueError(text)

    def raise_unpicklable(self):
        raise Unpicklable("holds a file")

    def raise_memory_error(self):
        raise MemoryError("cannot allocate 9 GB")

    def exit(self):
        sys.exit(7)

    def exit_hard(self, code):
        print("last words", flush=True)
        os._exit(code)

    def kill(self, rank, number=signal.SIGKILL):
        """Only this rank dies; the others wait as in a collective and see their peer vanish a moment before."""
        if rank == self.context.index:
            print("about to die", flush=True)
            time.sleep(0.2)
            os.kill(os.getpid(), number)
        time.sleep(0.1)
        raise ConnectionError("connection closed by peer")

    def sleep_if(self, rank, seconds):
        if rank == self.context.index:
            time.sleep(seconds)
        return self.context.index

    def fail_if(self, rank):
        if rank == self.context.index:
            raise ValueError(f"rank {rank} has bad luck")
        time.sleep(600)

    def spawn_grandchild(self):
        return subprocess.Popen(["sleep", "600"]).pid

    def unreadable(self):
        return Unreadable()

    async def slow(self, seconds):
        self.calls.append("slow")
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.calls.append("cancelled")
            raise
        return seconds

    def seen(self):
        return self.calls


class Unreadable:
    def __reduce__(self):
        return (load_bomb, ())


def load_bomb():
    raise MilesError("only the sender can read this")


def plain(context, **options):
    return Plain(context, **options)


class Rank(TrainerRank):
    """Weights are one float32 vector; the loss of a token is its id, and logprobs are -token."""

    def __init__(self, context, dp_size=None, tp=1, wrong="", size=1000, buckets=4, export_error=-1):
        self.context, self.tp, self.wrong = context, tp, wrong
        self.size, self.buckets, self.export_error = size, buckets, export_error
        self.weights = np.arange(size, dtype=np.float32)
        self.batches, self.exported, self.closed = [], 0, False
        self.info = RankInfo(
            rank=context.index,
            world_size=context.world_size if wrong != "world" else 7,
            dp_rank=context.index // tp,
            dp_size=context.world_size // tp,
            output=context.index % tp == 0 and wrong != "no-output",
        )

    def start(self):
        return self.info

    def forward(self, batch, role, outputs):
        self.batches.append(batch)
        rows = [-s.tokens.astype(np.float32) for s in batch.samples]
        if self.wrong == "rows":
            rows = rows[:-1]
        if self.wrong == "length":
            rows = [row[1:] for row in rows]
        return {name: rows for name in outputs}

    def step(self, batch, role="policy"):
        self.batches.append(batch)
        weights = batch.token_weights["policy"]
        loss = sum(float((w * s.tokens).sum()) for w, s in zip(weights, batch.samples, strict=True))
        tokens = sum(s.num_tokens for s in batch.samples)
        return StepReport(
            step=batch.step,
            loss=loss,
            grad_norm=1.0 if self.wrong != "grad" else 1.0 + self.info.dp_rank,
            lr=0.5,
            tokens=tokens,
            trainable=batch.num_trainable,
            seconds={"backward": 1.0 + self.info.rank},
            peak_bytes=10 * (1 + self.info.rank),
            metrics={"length": (float(tokens), float(len(batch.samples)), "mean"), "longest": (float(tokens), 1.0, "max")},
            auxiliary={"router": 0.25},
            columns={"logprobs": [-s.tokens.astype(np.float32) for s in batch.samples]},
        )

    def seen(self):
        """What the last batch of this rank held."""
        batch = self.batches[-1]
        fat = any(s.prompt is not None or s.response or s.scores or s.metadata for s in batch.samples)
        return {"ids": [s.trajectory_id for s in batch.samples], "fat": fat, "shared": batch.shared}

    def export(self, layout, bucket_bytes):
        self.exported = 0
        for index, part in enumerate(np.array_split(self.weights, self.buckets)):
            if index == self.export_error:
                raise ValueError("the export broke")
            specs = (TensorSpec(name=f"w{index}", dtype="float32", shape=part.shape, offset=0),)
            data = part.view(np.uint8)
            self.exported += 1
            publishes = self.info.rank == 0
            yield Bucket(
                index=index, tensors=specs if publishes else (), data=data if publishes else None, nbytes=data.nbytes
            )

    def num_exported(self):
        return self.exported

    def hang(self, rank):
        if rank == self.info.rank:
            time.sleep(600)

    def save(self, folder):
        (Path(folder) / f"rank-{self.info.rank}").write_text("saved")

    def load(self, folder, *, weights_only=False):
        assert (Path(folder) / f"rank-{self.info.rank}").read_text() == "saved"

    def close(self):
        self.closed = True


def make_rank(context, **options):
    return Rank(context, **options)


class TorchRank(Rank):
    """Ranks that really meet: the sum of (rank + 1) over a gloo all-reduce."""

    def start(self):
        import torch
        import torch.distributed as dist

        dist.init_process_group(
            "gloo",
            init_method=self.context.rendezvous,
            rank=self.context.index,
            world_size=self.context.world_size,
        )
        x = torch.tensor([float(self.context.index + 1)])
        dist.all_reduce(x)
        self.total = x.item()
        return self.info

    def reduced(self):
        return self.total


def make_torch_rank(context):
    return TorchRank(context)


class Engine(EngineReplica):
    """Holds weights as bytes; `fault` = (phase, what) goes wrong once."""

    capabilities = frozenset({"weights/ipc", "score"})

    def __init__(self, context=None, fault=None, name="engine-0"):
        self.id = name if context is None else f"{context.role}-{context.index}"
        self.fault = tuple(fault) if fault and (context is None or fault[2] == context.index) else None
        self.version, self.log, self.parts, self.weights = 0, [], {}, b""
        self.kinds = set()
        self.starts = 0

    async def start(self):
        self.starts += 1
        self.incarnation = f"{self.id}-{os.getpid()}-{self.starts}"

    async def receive(self, message):
        self.log.append(message.kind)
        assert message.incarnation == self.incarnation
        phase = message.bucket if message.kind == "ipc" else message.kind
        if self.fault and self.fault[0] == phase:
            what, self.fault = self.fault[1], None
            if what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "hang":
                await asyncio.sleep(600)
            if what == "raise":
                raise ValueError("cannot load this")
            if what == "corrupt":
                data, _ = open_bucket(message)
                return {"sha": "0" * 64}
            if what == "old-version":
                return {"version": 0}
        if message.kind == "begin":
            self.parts = {}
        if message.kind == "ipc":
            self.kinds |= {k for k in ("handle", "shm") if k in message.body}
            data, sha = open_bucket(message)
            self.parts[message.bucket] = np.array(data).tobytes()
            return {"sha": sha}
        if message.kind == "commit":
            self.weights = b"".join(self.parts[i] for i in sorted(self.parts))
            self.version = message.version
            return {"version": self.version, "state_hash": str(len(self.weights))}
        return {}

    async def state(self):
        return {"version": self.version, "weights": self.weights, "log": self.log, "kinds": self.kinds}

    async def generate(self, request):
        if request.seed == 666:
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(request.seed / 1000)
        tokens = np.arange(request.params.max_new_tokens, dtype=np.int32)
        return Generation(id=request.id, token_ids=tokens, logprobs=-tokens.astype(np.float32), finish="stop", versions=())

    async def abort(self, ids=None): ...
    async def pause(self, mode="abort"): ...
    async def resume(self): ...

    async def health(self):
        return {"version": self.version}

    async def close(self): ...


def make_engine(context, **options):
    return Engine(context, **options)
