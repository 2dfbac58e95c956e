"""The inside of a helper process: it does for strangers what might take all memory or all time, so that whoever asks it survives.

    on standard input    | u32 bytes N | f32 seconds | N bytes: what is asked |      ... again and again, until it ends
    on standard output   | u32 bytes N | f32 seconds | N bytes: the answer |         ... one for each: what it took of the processor

The first question is what the process needs to answer the others; the answer to it is empty, or says what is wrong.

The kernel holds the bounds, as nothing of Python runs while a library does: SIGPROF ends the process when a question has taken its seconds
of the processor, and a library that gets no memory raises MemoryError or ends it.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

from twostep.errors import SetupError

ASK = struct.Struct("<If")
ANSWER = struct.Struct("<If")
_NICENESS = 5


def serve(begin: Callable[[bytes], Callable[[bytes], bytes]]) -> None:
    """Answers one question after the other, and returns when there are no more. `begin` takes the first one, and returns what answers
    the others; it may raise SetupError."""
    os.nice(_NICENESS)
    # Where memory runs out all the same, this is the process that the kernel ends.
    Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # An interrupt at the terminal is for the router to see.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answer: Callable[[bytes], bytes] | None = None
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    while len(head := questions.read(ASK.size)) == ASK.size:
        num_bytes, seconds = ASK.unpack(head)
        if len(asked := questions.read(num_bytes)) < num_bytes:
            return
        begun_s = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, seconds)
        if answer is not None:
            said = answer(asked)
        else:
            try:
                answer, said = begin(asked), b""
            except SetupError as error:
                said = error.message.encode("utf-8", "surrogatepass")
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        answers.write(ANSWER.pack(len(said), time.process_time() - begun_s))
        answers.write(said)
        answers.flush()
        # Else as much stays here as the largest of them took.
        del asked, said


def limit_memory(num_bytes: int) -> None:
    """So many more than this process has now."""
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
