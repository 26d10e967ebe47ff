"""Compiles grammars in a process that can be killed, to learn whether they can be compiled at all.

Some schemas of a few bytes (``{"type": "integer", "multipleOf": 1234567}``) take minutes and gigabytes, and a thread that
compiles one cannot be stopped. What has passed here is compiled again where it is used.

The limit is one of processor time, so that a good grammar passes on a busy machine, too.
"""

import json
import re
import resource
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from math import inf

from headrace.engine.grammar import Grammar, GrammarKind
from headrace.engine.schema_size import least_chars

MEMORY_BYTES = 2 << 30
WAITS = 4
"""The child is given up after so many times the limit by the clock, whatever it waits for."""

ENDLESS = "no answer of this form has an end: its JSON schema needs itself again and again"
_TOKEN = re.compile(r"<\[\d+\]>")


class GrammarTooComplex(Exception):
    """The grammar takes more time or memory than is allowed."""


class GrammarChecker:
    """A child process that compiles one grammar at a time; made again when one took too long and was killed.

    limit_s: seconds of processor time that one may take.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._child: subprocess.Popen[bytes] | None = None

    def check(self, grammar: Grammar) -> int:
        """Characters that every answer has at least, as far as that is known.

        Raises BadGrammar and GrammarTooComplex; OSError where there is no child to ask, which says nothing of the grammar.
        """
        from headrace.engine.guidance import BadGrammar

        child = self._running()
        assert child.stdin
        assert child.stdout
        try:
            child.stdin.write(json.dumps(asdict(grammar)).encode() + b"\n")
            child.stdin.flush()
            answer = child.stdout.readline()
        except OSError:
            answer = b""
        if not answer:
            self.close()
            raise GrammarTooComplex
        problem, least = json.loads(answer)
        if problem is not None:
            raise BadGrammar(problem)
        assert isinstance(least, int)
        return least

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._child is not None and self._child.poll() is not None:
            self.close()  # others ended it since the last grammar
        if self._child is None:
            command = [sys.executable, "-m", "headrace.engine.grammar_check", str(self._limit_s)]
            child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
            assert child.stdout
            self._child = child
            if not child.stdout.readline():
                self.close()
                raise ChildProcessError("the process that checks grammars did not start")
        return self._child


class Bytes:
    """A vocabulary of single bytes: whether a grammar can be compiled hardly depends on the model's."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def _of_bytes(grammar: Grammar) -> Grammar:
    """The grammar with one byte in place of each of the model's tokens that it names."""
    source = _TOKEN.sub("<[0]>", grammar.source) if grammar.kind is GrammarKind.LARK else grammar.source
    return replace(grammar, source=source, before=_TOKEN.sub("<[0]>", grammar.before))


def _least_chars(grammar: Grammar) -> int:
    """Characters that every answer has at least, as far as a JSON schema says it. Raises BadGrammar where none has an end."""
    from headrace.engine.guidance import BadGrammar

    if grammar.kind is not GrammarKind.JSON_SCHEMA:
        return 0  # a schema inside a grammar may be one of several alternatives
    least = least_chars(json.loads(grammar.source))
    if least == inf:
        raise BadGrammar(ENDLESS)
    return int(least)


def _serve(limit_s: float) -> None:
    """Grammars come in on stdin, a line each; what is wrong with each and how short its answers may be go out on stdout.

    An empty line goes out first, once it is ready. Ends with the parent. One that takes longer than ``limit_s`` ends this
    process: a timer needs no thread that could still run.
    """
    import llguidance

    from headrace.engine.guidance import BadGrammar, compile_matcher

    # A supervisor may tell all processes to end: an end of this one would speak against the grammar that it has.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))
    print(flush=True)
    for line in sys.stdin.buffer:
        fields = json.loads(line)
        grammar = Grammar(**fields | {"kind": GrammarKind(fields["kind"])})
        problem, least = None, 0
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        signal.setitimer(signal.ITIMER_REAL, WAITS * limit_s)
        try:
            compile_matcher(tokenizer, _of_bytes(grammar))
            least = _least_chars(grammar)
        except BadGrammar as bad:
            problem = str(bad)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps([problem, least]), flush=True)


if __name__ == "__main__":
    _serve(float(sys.argv[1]))
