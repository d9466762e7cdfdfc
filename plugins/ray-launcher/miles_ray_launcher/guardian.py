"""Run as a program beside each actor, `guardian.py SESSION [FOLDER]`: waits until its standard input ends, which it does
when the actor's process is gone, however hard it died, and then kills what is left in that session and removes the folder.

Ray ends the actor itself, also when the driver is gone; this ends what the actor had started. It goes on as a grandchild,
whose id it prints, since Ray kills an actor's children together with it. Imports nothing of ours, so that it starts in
milliseconds.
"""

import contextlib
import os
import shutil
import signal
import sys


def main(session: int, folder: str = "") -> None:
    if child := os.fork():
        print(child)
        return
    os.close(1)
    while os.read(0, 4096):
        pass
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{int(name)}/stat", "rb") as file:
                found = int(file.read().rpartition(b")")[2].split()[3])
            if found == session:
                os.kill(int(name), signal.SIGKILL)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
