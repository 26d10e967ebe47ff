"""JSON Schema's own test suite, against what structured output enforces.

    python -m pip download --no-deps --no-binary :all: jsonschema && tar xzf jsonschema-*.tar.gz
    python bench/json_schema_suite.py jsonschema-*/json --draft 2020-12

The suite comes with the source distribution of the package jsonschema. Each test says whether a value fits a schema. It passes if
the value, as ``json.dumps`` writes it with the properties in the schema's order, is allowed exactly when it fits. A schema that is refused
is told apart: none of its answers can be wrong. What passes for both is the share of schemas that can be used as they stand.
"""

import argparse
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llguidance

from headrace.engine.grammar import Grammar
from headrace.engine.grammar_check import Bytes
from headrace.engine.guidance import BadGrammar, compile_matcher


@dataclass
class Tally:
    """Of a draft: groups and tests that were refused, passed, or failed; why; and which failed."""

    groups: Counter[str] = field(default_factory=Counter)
    tests: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)


def allows(matcher: Any, text: str) -> bool:
    """Whether an answer may be this text."""
    own = matcher.deep_copy()
    return bool(own.consume_tokens(list(text.encode())) and own.is_accepting())


def in_order(value: Any, schema: Any) -> Any:
    """The value with its properties in the schema's order, as far as that says one; others behind them."""
    if isinstance(value, list):
        items = schema.get("items") if isinstance(schema, dict) else None
        return [in_order(item, items) for item in value]
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties", {}) if isinstance(schema, dict) else {}
    names = [name for name in properties if name in value] + [
        name for name in value if name not in properties
    ]
    return {name: in_order(value[name], properties.get(name)) for name in names}


def run(suite: Path, draft: str, only: str) -> Tally:
    """Every required test of a draft."""
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))
    tally = Tally()
    for path in sorted((suite / "tests" / f"draft{draft}").glob(f"{only}.json")):
        for group in json.loads(path.read_text()):
            if not isinstance(group["schema"], dict):  # true and false: no job can send them
                continue
            try:
                matcher = compile_matcher(tokenizer, Grammar.json_schema(group["schema"]))
            except BadGrammar as bad:
                tally.groups["refused"] += 1
                tally.tests["refused"] += len(group["tests"])
                tally.reasons[_reason(str(bad), path.stem)] += 1
                continue
            wrong = []
            for test in group["tests"]:
                text = json.dumps(in_order(test["data"], group["schema"]), ensure_ascii=False)
                if allows(matcher, text) == test["valid"]:
                    tally.tests["passed"] += 1
                else:
                    kind = "too strict" if test["valid"] else "too lax"
                    tally.tests[kind] += 1
                    wrong.append(f"{path.stem}: {group['description']}: {test['description']} ({kind})")
            tally.groups["failed" if wrong else "passed"] += 1
            tally.failed += wrong
    return tally


def _reason(message: str, file: str) -> str:
    if message.startswith(("Unimplemented keys", "Unknown format", "oneOf")):
        return message.split(". ")[0]
    return f"{message.split(':')[0][:60]} (in {file})"


def main() -> None:
    """Print the tally, what is refused and why, and what fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", type=Path, help="the suite's directory, which holds tests/draft2020-12")
    parser.add_argument("--draft", default="2020-12")
    parser.add_argument("--only", default="*", help="files of this name")
    args = parser.parse_args()
    tally = run(args.suite, args.draft, args.only)
    print(f"llguidance {llguidance.__version__}, draft {args.draft}")
    print("schemas:", dict(tally.groups), "of", tally.groups.total())
    print("tests:", dict(tally.tests), "of", tally.tests.total())
    print("refused:", *(f"  {count:3} {reason}" for reason, count in tally.reasons.most_common()), sep="\n")
    print("failed:", *(f"  {name}" for name in tally.failed), sep="\n")


if __name__ == "__main__":
    main()
