"""Lines of OpenAI's batch format: ``{custom_id, method, url, body}``, read as jobs.

Beside ``body`` a line may carry the fields of PromptJob that OpenAI's format has no place for: ``job_id``,
``batch_id``, ``tenant``, ``deadline``, ``metadata``, ``idempotency_key``, ``requires``, ``schema_version``.
"""

from collections.abc import Mapping
from typing import Any

from headrace.schemas.answer_form import FORM_FIELDS
from headrace.schemas.errors import ErrorCode
from headrace.schemas.explain import Wrong
from headrace.schemas.looks import Embedding
from headrace.schemas.options import NOT_YET
from headrace.schemas.sampling import Sampling

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
EMBEDDINGS_URL = "/v1/embeddings"
URLS = (CHAT_URL, COMPLETIONS_URL, EMBEDDINGS_URL)

# Of PromptJob; a batch line has its prompt in its body.
PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages", "inputs")
_PROMPT_OF = {CHAT_URL: "messages", COMPLETIONS_URL: "prompt", EMBEDDINGS_URL: "input"}
_EMBEDDING_OPTIONS = frozenset(Embedding.model_fields)
_SAMPLING_OPTIONS = frozenset(Sampling.model_fields)
CHAT_FIELDS = (
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
)
# Objects whose fields stand in a body by themselves: two of PromptJob's, and one that OpenAI's clients merge into it.
_WRITTEN_OUT = ("sampling", "embedding", "extra_body")
BODY_FIELDS = _SAMPLING_OPTIONS | {*CHAT_FIELDS, *FORM_FIELDS, *_WRITTEN_OUT, "continuations"}
LINE_FIELDS = frozenset(
    {
        "schema_version",
        "job_id",
        "idempotency_key",
        "tenant",
        "batch_id",
        "custom_id",
        "deadline",
        "metadata",
        "requires",
    }
)


class BadLine(Exception):
    """The line is not one that can be read as a job."""

    def __init__(self, code: ErrorCode, message: str, param: str) -> None:
        super().__init__(message)
        self.wrong = Wrong(code, message, param)


def is_batch_line(record: Mapping[str, Any]) -> bool:
    """Whether a record is a line of OpenAI's batch format rather than a PromptJob."""
    return ("url" in record or "body" in record) and not any(field in record for field in PROMPT_FIELDS)


def to_job(line: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of PromptJob for a batch line, not yet validated. Raises BadLine."""
    url, body = _check(line)
    sampling = {name: item for name, item in body.items() if name in _SAMPLING_OPTIONS or name in NOT_YET}
    job = {name: item for name, item in line.items() if name in LINE_FIELDS}
    job |= {name: body[name] for name in (*CHAT_FIELDS, *FORM_FIELDS, "continuations") if name in body}
    if url == EMBEDDINGS_URL:
        job["embedding"] = {name: body[name] for name in _EMBEDDING_OPTIONS if name in body}
    return {**job, **_prompt(url, body), "model": body.get("model"), "sampling": sampling}


def param(path: str, url: str) -> str:
    """Where the field of PromptJob at ``path`` stands in a batch line of this url."""
    outer, dot, inner = path.partition(".")
    if outer in LINE_FIELDS:
        return path
    if outer in ("sampling", "embedding"):
        return f"body.{inner}"
    if outer in ("prompt", "prompt_token_ids", "inputs"):
        outer = _PROMPT_OF.get(url, "prompt")
    return f"body.{outer}{dot}{inner}"


def _check(line: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    for field in ("custom_id", "url", "body"):
        if line.get(field) is None:
            raise BadLine(ErrorCode.MISSING_FIELD, f"{field} is missing from the batch line", field)
    if line.get("method", "POST") != "POST":
        raise BadLine(ErrorCode.INVALID_VALUE, "method must be POST", "method")
    url, body = line["url"], line["body"]
    if url not in URLS:
        raise BadLine(ErrorCode.UNSUPPORTED_URL, f"url must be one of {', '.join(URLS)}", "url")
    if not isinstance(body, dict):
        raise BadLine(ErrorCode.INVALID_TYPE, "body must be an object", "body")
    _refuse_misplaced(line, body)
    return url, body


def _refuse_misplaced(line: Mapping[str, Any], body: Mapping[str, Any]) -> None:
    """Raise for the first option that stands where it would be ignored."""
    for name in _WRITTEN_OUT:
        if body.get(name) is not None:
            message = f"body.{name} must be left out: what it holds belongs in `body` itself"
            raise BadLine(ErrorCode.MISPLACED_OPTION, message, f"body.{name}")
    for name in line:
        if name in BODY_FIELDS and line[name] is not None:
            raise BadLine(ErrorCode.MISPLACED_OPTION, f"{name} belongs inside `body`", name)


def _prompt(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    wanted = _PROMPT_OF[url]
    for other in _PROMPT_OF.values():
        if other != wanted and body.get(other) is not None:
            raise BadLine(ErrorCode.INVALID_VALUE, f"body.{other} does not belong to {url}", f"body.{other}")
    prompt = body.get(wanted)
    if prompt is None:
        raise BadLine(ErrorCode.MISSING_FIELD, f"body.{wanted} is missing", f"body.{wanted}")
    if wanted == "messages":
        return {wanted: prompt}
    if not isinstance(prompt, list):
        return {"prompt": prompt}
    # OpenAI allows a list of strings, of token ids, or of lists of token ids.
    if any(isinstance(item, str | list) for item in prompt):
        if url == EMBEDDINGS_URL and len(prompt) > 1:
            return {"inputs": prompt}
        if len(prompt) > 1:  # an answer belongs to one prompt
            raise BadLine(
                ErrorCode.UNSUPPORTED_OPTION,
                f"body.{wanted} must be one prompt; send a line for each",
                f"body.{wanted}",
            )
        prompt = prompt[0]
    return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
