"""The start of every stand-in training: plain Python that writes what the worker writes, without torch.

A test's own lines follow below; they run in the training process with these names at hand.
"""

import fcntl
import json
import os
import signal
import sys
import time

RUN_DIR = sys.argv[1]
RANK = 0
LOCK = None


def append(name, record):
    suffix = "" if RANK == 0 else f".rank{RANK}"
    fd = os.open(f"{RUN_DIR}/{name}{suffix}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.write(fd, json.dumps({"t_ns": time.monotonic_ns(), **record}).encode() + b"\n")
    os.close(fd)


def say(kind, **fields):
    append("worker", {"kind": kind, **fields})


def begin(rank=0, world_size=1):
    """Begin as a rank does: hold the lock, and record its identity."""
    global RANK, LOCK
    RANK = rank
    LOCK = os.open(f"{RUN_DIR}/alive.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(LOCK, fcntl.LOCK_SH)
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    say("started", rank=rank, world_size=world_size, pid=os.getpid(), start_ticks=ticks)
    say("phase", phase="model")


def train(steps=5, first=1, **actual):
    """Enter training and take steps of 10 ms, the first two of them warm-up, 4 samples and 40 tokens each."""
    if first == 1:
        ran = {"wrapper": "none", "optimizer": "AdamW", "param_dtype": "float32", "world_size": 1, "device": "cpu"}
        say("actual", **{**ran, **actual})
        say("phase", phase="train")
    for number in range(first, first + steps):
        step(number)


def step(number, **fields):
    figures = {"warmup": number <= 2, "samples": 4, "tokens": 40, "loss": 10.0 - number, "step_ms": 10.0}
    append("steps", {"step": number, **figures, **fields})


def fail(type, message, phase="train", step=None, **fields):
    """Record the exception that ends a rank."""
    chain = [{"type": type, "message": message}]
    say("exception", rank=RANK, phase=phase, step=step, type=type, message=message, chain=chain, **fields)


def spawn_rank(rank, world_size, life):
    """Fork a rank in a session of its own, as torchrun does; `life` is all it does."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        begin(rank, world_size)
        life()
        os._exit(0)
    return pid


def wait_for_ever():
    while True:
        signal.pause()


def wait_for(path):
    """Wait until a test has made the file."""
    while not os.path.exists(os.path.join(RUN_DIR, path)):
        time.sleep(0.005)


# ---- the test's own lines ----
