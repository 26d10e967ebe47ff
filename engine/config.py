"""How an engine is set up: one frozen record, every default explained."""

from dataclasses import dataclass

from headrace.engine.errors import EngineError
from headrace.engine.priorities import Priority


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. ``None`` means: chosen for the device and the model when the engine is built.

    model: a Hugging Face directory or hub id. weights: ``checkpoint``, or ``random`` (normal, deviation 0.02, made on
    the device from config.json alone; for benchmarks). device: ``cpu``, ``cuda``, ``cuda:1`` or ``auto``.
    dtype: ``bfloat16``, ``float16`` or ``float32``, of weights and KV cache.

    block_size: tokens in a KV block, for allocation and for prefix hashing. kv_tokens: size of the KV cache in tokens
    (CUDA: what ``memory_fraction`` of the card leaves after a profiled peak; CPU: 65,536). max_slots: sequences at once.
    max_batched_tokens: token budget of a step, prefill and decode together (CUDA: 8,192; CPU: 256). max_context: longest
    prompt + output, no more than the model takes.

    lag: how many steps may be launched before the tokens of the oldest are read back (0, 1 or 2).
    prefix_cache: share blocks between prompts that begin alike. priorities: how requests of priority 0, 1, ... are
    treated; those beyond as ``Priority()`` says. cuda_graphs: replay decode steps, and small steps with prompts, as
    graphs. batch_invariant: the same bits whatever else is in a batch, and however a sequence was cut into steps; slower.

    Of the text side: chat_template, a file with a template in place of the model's own; tool_form, how the model writes
    tool calls (hermes, llama3, mistral; auto: what its template says).
    """

    model: str
    weights: str = "checkpoint"
    device: str = "auto"
    dtype: str = "bfloat16"
    block_size: int = 32
    kv_tokens: int | None = None
    memory_fraction: float = 0.9
    max_slots: int | None = None
    max_batched_tokens: int | None = None
    max_context: int | None = None
    lag: int | None = None
    prefix_cache: bool = True
    priorities: tuple[Priority, ...] = ()
    cuda_graphs: bool = True
    batch_invariant: bool = False
    chat_template: str | None = None
    tool_form: str = "auto"

    def __post_init__(self) -> None:
        """Refuse what could never run, naming the field."""
        _require(self.weights in ("checkpoint", "random"), "weights must be 'checkpoint' or 'random'")
        _require(self.dtype in ("bfloat16", "float16", "float32"), f"dtype {self.dtype!r} is not supported")
        _require(self.block_size >= 1, "block_size must be at least 1")
        _require(0.05 <= self.memory_fraction <= 0.98, "memory_fraction must lie between 0.05 and 0.98")
        _require(self.lag in (None, 0, 1, 2), "lag must be 0, 1 or 2")
        for name in ("kv_tokens", "max_slots", "max_batched_tokens", "max_context"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"{name} must be at least 1")
        _require(
            self.kv_tokens is None or self.kv_tokens >= self.block_size,
            f"kv_tokens is {self.kv_tokens}, and the KV cache needs at least one block of {self.block_size}:"
            " raise kv_tokens (HEADRACE_KV_TOKENS)",
        )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise EngineError(message)
