"""The AsyncAPI 3.0 description of Headrace's topics, seen from Headrace: it receives jobs and sends results."""

from typing import Any

from headrace.schemas import topics
from headrace.schemas.topics import Topics

_FORMAT = "application/schema+json;version=draft-2020-12"
_JOB_HEADERS = (*topics.FIELD_HEADERS, topics.SUBMISSION, *topics.REPEAT_HEADERS)
_RESULT_HEADERS = (topics.TENANT, topics.BATCH_ID, topics.CUSTOM_ID, topics.CONTENT)
_DEAD_HEADERS = (*topics.FIELD_HEADERS, topics.SUBMISSION, *topics.DEAD_HEADERS)
_CONTROL = {
    "BatchOpened": ("batch_opened", "A batch exists, and its jobs follow."),
    "BatchClosed": ("batch_closed", "No more jobs follow: this many were sent."),
    "CancelJob": ("cancel_job", "End a job that has not ended, or is still to come."),
    "CancelBatch": ("cancel_batch", "End the jobs of a batch that have not ended, and those still to come."),
}


def asyncapi(names: Topics | None = None) -> dict[str, Any]:
    """The document, for the topics of one installation (the default one)."""
    names = names or Topics()
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Headrace",
            "version": "1.0.0",
            "description": "Prompts in on Kafka, answers out on Kafka. See messages.md for what the fields mean.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "channels": _channels(names),
        "operations": _operations(),
        "components": {"messages": _messages()},
    }


def _channels(names: Topics) -> dict[str, Any]:
    tiers = list(names.tiers)
    jobs = {
        **_channel(
            names.jobs(tiers[0]).removesuffix(tiers[0]) + "{tier}",
            "Prompts to answer. The tier is the topic; no order is promised, not even within a partition.",
            ["PromptJob", "BatchLine"],
        ),
        "parameters": {"tier": {"enum": tiers, "description": "How urgent, the most urgent first."}},
    }
    return {
        "jobs": jobs,
        "results": _channel(
            names.results,
            "One record for each run that ended, at least once: drop duplicates by (id, run).",
            ["JobResult"],
        ),
        "control": _channel(names.control, "Batches opened and closed, and cancels.", list(_CONTROL)),
        "dead": _channel(
            names.dead,
            "Records that were rejected, and jobs that failed by `engine_failure`, `non_finite_values` or `internal_error`.",
            ["DeadLetter"],
        ),
    }


def _channel(address: str, description: str, messages: list[str]) -> dict[str, Any]:
    return {
        "address": address,
        "description": description,
        "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in messages},
    }


def _operations() -> dict[str, Any]:
    return {
        "receiveJob": _operation("receive", "jobs", "Take a job, and end it in exactly one terminal state."),
        "receiveControl": _operation("receive", "control", "Take note of a batch or a cancel."),
        "sendResult": _operation("send", "results", "Tell how a run of a job ended."),
        "sendDeadLetter": _operation(
            "send",
            "dead",
            "Put aside a rejected record, or a job that failed by the engine's fault or Headrace's own.",
        ),
    }


def _operation(action: str, channel: str, summary: str) -> dict[str, Any]:
    return {"action": action, "channel": {"$ref": f"#/channels/{channel}"}, "summary": summary}


def _messages() -> dict[str, Any]:
    key = "The job's id, or whatever the producer likes: it spreads records, and nothing reads it."
    return {
        "PromptJob": _message("prompt_job", "A prompt to answer.", _JOB_HEADERS, key),
        "BatchLine": _message("batch_line", "A line of OpenAI's batch format.", _JOB_HEADERS, key),
        "JobResult": _message("job_result", "How a run of a job ended.", _RESULT_HEADERS, "The job's id."),
        **{
            name: _message(
                file, summary, (topics.TENANT,), "tenant/target: all messages about one target share it."
            )
            for name, (file, summary) in _CONTROL.items()
        },
        "DeadLetter": {
            **_message("", "A record as it came, byte for byte.", _DEAD_HEADERS, "As it came."),
            "contentType": "application/octet-stream",
            "payload": {"description": "Any bytes, or none."},
        },
    }


def _message(file: str, summary: str, headers: tuple[str, ...], key: str) -> dict[str, Any]:
    return {
        "summary": summary,
        "contentType": "application/json",
        "headers": {"type": "object", "properties": {name: {"type": "string"} for name in headers}},
        "payload": {"schemaFormat": _FORMAT, "schema": {"$ref": f"./schemas/{file}.json"}},
        "bindings": {"kafka": {"key": {"type": "string", "description": key}, "bindingVersion": "0.5.0"}},
    }
