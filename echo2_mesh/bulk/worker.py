"""The bulk process: `python -m echo2_mesh.bulk.worker FOLDER`, started by `net.lanes`.

Carries every byte of weights, so that encryption, hashing and disk never delay the daemon's
heartbeats. Frames on its pipes are `bulk.words`; it ends when its parent does.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from functools import partial
from pathlib import Path
from typing import assert_never

from echo2_mesh.bulk import words
from echo2_mesh.bulk.certificate import make_contexts
from echo2_mesh.bulk.door import Door
from echo2_mesh.bulk.hub import Hub
from echo2_mesh.bulk.loop import Loop
from echo2_mesh.bulk.opening import Attempt
from echo2_mesh.bulk.shelf import Shelf
from echo2_mesh.bulk.tickets import Ticket, Tickets
from echo2_mesh.child import ChildPipe, take_pipes

NICE = 5
"""The daemon's control traffic comes first."""


class Worker:
    """Takes the daemon's words in the loop's thread."""

    def __init__(self, loop: Loop, folder: Path, pipe: ChildPipe, listen: words.Listen) -> None:
        self._loop = loop
        self._pipe = pipe
        self._writing = threading.Lock()
        server, client, self._certificate = make_contexts()
        self._tickets = Tickets()
        self._hub = Hub(loop, Shelf(folder), self._report, listen)
        self._door = Door(loop, (server, client), self._tickets, self._hub.counters, self._hub.add)

    def listen(self, word: words.Listen) -> bool:
        """Open the port and say so; False after saying why not."""
        try:
            places = self._door.listen(word.places)
        except OSError as error:
            place = error.filename if isinstance(error.filename, tuple) else ("", 0)
            self._report(words.Unable(place=place, why=error.strerror or str(error)))
            return False
        self._report(
            words.Listening(places=places, port=self._door.port, certificate=self._certificate)
        )
        return True

    def _report(self, word: words.Report) -> None:
        with self._writing:
            self._pipe.write(words.encode(word))

    def handle(self, word: words.Command) -> None:
        """Do one word."""
        match word:
            case words.Get():
                self._hub.get(word)
            case words.Cancel(request=request):
                self._hub.cancel(request)
            case words.Expect(digests=digests):
                self._hub.expect(frozenset(digests))
            case words.Landed(digests=digests):
                for digest in digests:
                    self._hub.landed(digest)
            case words.Admit(token=token, peer=peer, lifetime_s=lifetime_s, way=way):
                now_s = self._loop.now_s
                self._tickets.admit(token, Ticket(peer, now_s + lifetime_s, way), now_s)
            case words.Dial():
                attempt = self._attempt(word, word.way, server=False)
                self._door.dial(attempt, word.places)
            case words.Punch():
                attempt = self._attempt(word, "punched", server=word.server)
                self._door.punch(attempt, word.places, word.timeout_s)
            case words.HangUp(peer=peer):
                self._hub.hang_up(peer)
            case words.Listen():
                raise AssertionError("once, and first")
            case _:
                assert_never(word)

    def _attempt(self, word: words.Dial | words.Punch, way: str, *, server: bool) -> Attempt:
        def done(why: str) -> None:
            self._report(words.Reached(attempt=word.attempt, why=why))

        return Attempt(
            peer=word.peer,
            way=way,
            certificate=word.certificate,
            token=word.token,
            server=server,
            done=done,
        )


def main() -> None:
    pipe = take_pipes()
    with contextlib.suppress(OSError):
        os.nice(NICE)
    frame = pipe.read()
    if frame is None:
        return
    first = words.decode_command(frame)
    assert isinstance(first, words.Listen)
    loop = Loop()
    worker = Worker(loop, Path(sys.argv[1]), pipe, first)
    if not worker.listen(first):
        return

    def read() -> None:
        while (frame := pipe.read()) is not None:
            loop.post(partial(worker.handle, words.decode_command(frame)))
        loop.post(loop.end)

    threading.Thread(target=read, name="bulk-pipe", daemon=True).start()
    loop.run()
    os._exit(0)  # blobs being written are parts that nobody misses


if __name__ == "__main__":
    main()
