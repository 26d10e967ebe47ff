"""From text requests to prompts in token ids, a whole batch at a time."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.engine.chat import ChatFormat
from headrace.engine.errors import InvalidRequest
from headrace.engine.tokenizer import Tokenizer
from headrace.engine.validation import Limits, check_prompt, check_text, prompt_form, validate

if TYPE_CHECKING:
    from headrace.engine.text_engine import TextRequest


def prompt_ids(
    requests: Sequence["TextRequest"], tokenizer: Tokenizer, chat_format: ChatFormat, limits: Limits
) -> list[list[int] | InvalidRequest]:
    """Each request's prompt in ids (none where it has ``inputs``), or what is wrong with it, in their order."""
    results: list[list[int] | InvalidRequest] = [[]] * len(requests)
    plain: dict[int, str] = {}
    rendered: dict[int, str] = {}
    for place, request in enumerate(requests):
        try:
            validate(request, limits)
            if request.prompt is not None:
                plain[place] = request.prompt
            elif request.messages is not None:
                text = _rendered(request, request.messages, tokenizer, chat_format)
                check_text(text, "messages", limits, truncated=request.truncate_prompt_tokens is not None)
                rendered[place] = text
            elif request.inputs is not None:
                continue  # several prompts, which ``looks`` reads
            else:
                results[place] = list(request.prompt_token_ids or ())
        except InvalidRequest as error:
            results[place] = error
    for texts, encode in ((plain, tokenizer.encode_many), (rendered, tokenizer.encode_rendered)):
        for place, ids in zip(texts, encode(list(texts.values())), strict=True):
            results[place] = ids
    for place, request in enumerate(requests):
        result = results[place]
        if isinstance(result, list) and request.inputs is None:
            if request.truncate_prompt_tokens is not None:
                result = results[place] = result[-request.truncate_prompt_tokens :]
            try:
                answer = 0 if request.looks else max(1, request.sampling.min_tokens)
                check_prompt(result, prompt_form(request), answer, limits)
            except InvalidRequest as error:
                results[place] = error
    return results


def _rendered(
    request: "TextRequest",
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    chat_format: ChatFormat,
) -> str:
    options = request.chat
    chat_format.check(options)
    return tokenizer.render_chat(
        messages,
        tools=options.shown_tools,
        add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continue_final_message,
        template_kwargs=options.template_kwargs,
    )
