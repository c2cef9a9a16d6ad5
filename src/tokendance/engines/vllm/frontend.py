"""The front end: separators, message boundaries and hints of a request, before the engine sees it.

Works in the process that tokenises, for LLM and AsyncLLM alike. What it finds travels to the
scheduler side as `kv_transfer_params["tokendance"]`:

    segments: lengths in tokens, adding up to the prompt's
    marked:   the client marked the segments itself (separators or lengths)
    mode, salt, and of session, round, agent, size, backend those that the client named

A request with one segment and no hints is passed on as it came.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, cast

from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import SamplingParams
from vllm.utils.async_utils import make_async

from tokendance.config import Config
from tokendance.engines.vllm.support import connector_options, is_ours
from tokendance.engines.vllm.tokenizer import message_starts, piece_tokenizer
from tokendance.prompt.hints import HintError, Hints
from tokendance.prompt.messages import message_cuts
from tokendance.prompt.segments import boundaries, clip_lengths, lengths_of
from tokendance.prompt.separator import split_text
from tokendance.reuse.recovery import names

logger = init_logger(__name__)

FIELD = "tokendance"
LENGTHS = "tokendance_segments"
"""Key of the segment lengths in vLLM's prompt dictionaries, between tokeniser and engine."""


class FrontEnd:
    """What one engine's front end knows about its tokenizer and configuration."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self.config = config
        self.backends = frozenset(names())
        self.pieces = piece_tokenizer(tokenizer, config.keep_separator)
        self.message_starts = message_starts(tokenizer)
        if tokenizer is not None and self.pieces.problem:
            logger.warning("%s is not available: %s.", config.separator, self.pieces.problem)

    def refuse_separator(self, reason: str) -> VLLMValidationError:
        text = f"the separator {self.config.separator} cannot be used here: {reason}"
        return VLLMValidationError(text, parameter="prompt")

    def tokenize(self, text: str, *, special: bool) -> tuple[list[int], list[int], str]:
        """Token ids, segment lengths and visible text of a prompt that contains the separator."""
        if self.pieces.problem:
            raise self.refuse_separator(self.pieces.problem)
        texts = split_text(text, self.config.separator)
        ids, lengths = self.pieces.prompt(texts, special=special)
        return ids, lengths, self.config.keep_separator.join(texts)

    def hints(self, params: Mapping[str, Any] | None) -> Hints:
        """The hints in a request's kv_transfer_params; malformed ones are a client error."""
        try:
            hints = Hints.parse((params or {}).get(FIELD))
            if hints.backend is not None and hints.backend not in self.backends:
                text = f"unknown, there is {', '.join(sorted(self.backends))}"
                raise HintError("backend", text, hints.backend)
        except HintError as error:
            raise _client_error(error) from None
        return hints

    def segments(self, engine_input: Mapping[str, Any], hints: Hints) -> tuple[int, ...]:
        """Segment lengths of a prompt of token ids."""
        total = len(engine_input["prompt_token_ids"])
        separated = engine_input.get(LENGTHS)
        if hints.segments is not None:
            if separated is not None:
                raise _client_error(HintError("segments", "not together with separators"))
            if sum(hints.segments) != total:
                text = f"add up to {sum(hints.segments)}, but the prompt has {total} tokens"
                raise _client_error(HintError("segments", text))
            return hints.segments
        cuts = message_cuts(engine_input["prompt_token_ids"], self.message_starts)
        if separated is not None:
            cuts += boundaries(separated, total)
        return lengths_of(cuts, total)

    def annotate(self, engine_input: Mapping[str, Any], params: SamplingParams) -> SamplingParams:
        """The parameters with what the scheduler side has to know; `params` stays as it is."""
        extra = params.extra_args or {}
        transfer = extra.get("kv_transfer_params") or {}
        hints = self.hints(transfer)
        if engine_input.get("type") != "token":
            # K/V of such a prompt depends on more than its token ids.
            if FIELD not in transfer:
                return params
            rest = {key: value for key, value in transfer.items() if key != FIELD}
            return _with_transfer(params, rest)
        lengths = self.segments(engine_input, hints)
        marked = hints.segments is not None or LENGTHS in engine_input
        if FIELD not in transfer and not marked and len(lengths) <= 1:
            return params
        note: dict[str, Any] = {
            "segments": list(lengths),
            "marked": marked,
            "mode": hints.mode or self.config.mode,
            "salt": engine_input.get("cache_salt") or "",
        }
        for name in ("session", "round", "agent", "size", "backend", "retain"):
            if (value := getattr(hints, name)) is not None:
                note[name] = value
        return _with_transfer(params, {**transfer, FIELD: note})

    def check(self, engine_input: Mapping[str, Any], params: Mapping[str, Any] | None) -> None:
        """Raise what `annotate` would, before a streamed response has started."""
        hints = self.hints(params)
        if hints.segments is not None and engine_input.get("type") == "token":
            self.segments(engine_input, hints)


def _round_class(base: Any) -> Any:
    """A renderer class that lets FrontEnd read separators, whatever vLLM's class is."""

    class RoundRenderer(base):
        tokendance: FrontEnd

        def _tokenize_prompt(self, prompt: Any, params: Any) -> Any:
            if self.tokendance.config.separator not in prompt["prompt"]:
                return super()._tokenize_prompt(prompt, params)
            return _tokenize_pieces(self, prompt, params)

        def process_for_engine(self, prompt: Any, *args: Any, **kwargs: Any) -> Any:
            engine_input = super().process_for_engine(prompt, *args, **kwargs)
            return _carry_lengths(self, prompt, engine_input, kwargs.get("tok_params"))

        async def process_for_engine_async(self, prompt: Any, *args: Any, **kwargs: Any) -> Any:
            engine_input = await super().process_for_engine_async(prompt, *args, **kwargs)
            return _carry_lengths(self, prompt, engine_input, kwargs.get("tok_params"))

        def render_messages(self, messages: Any, params: Any) -> Any:
            result = super().render_messages(messages, params)
            _require_text(self, messages, result[1])
            return result

        async def render_messages_async(self, messages: Any, params: Any) -> Any:
            result = await super().render_messages_async(messages, params)
            _require_text(self, messages, result[1])
            return result

    return RoundRenderer


def _tokenize_pieces(renderer: Any, prompt: Any, params: Any) -> Any:
    front: FrontEnd = renderer.tokendance
    if renderer._wants_offsets(prompt, params):
        raise front.refuse_separator("token offsets were asked for")
    ids, lengths, text = front.tokenize(prompt["prompt"], special=params.add_special_tokens)
    result = renderer._build_tokens_prompt(ids, {**prompt, "prompt": text})
    result[LENGTHS] = lengths
    return result


def _carry_lengths(renderer: Any, prompt: Any, engine_input: Any, tok_params: Any) -> Any:
    """Hand the segment lengths on, after vLLM's truncation and padding."""
    lengths = prompt.get(LENGTHS)
    if lengths is None or engine_input.get("type") != "token":
        return engine_input
    kept, total = len(engine_input["prompt_token_ids"]), sum(lengths)
    side = getattr(tok_params, "truncation_side", None) or renderer.tokenizer.truncation_side
    if kept < total:
        lengths = clip_lengths(lengths, kept, left=side == "left")
    engine_input[LENGTHS] = [*lengths, kept - total] if kept > total else list(lengths)
    return engine_input


def _require_text(renderer: Any, messages: Any, prompt: Any) -> None:
    """Where the renderer itself made token ids, a separator is already lost among them."""
    front: FrontEnd = renderer.tokendance
    if "prompt_token_ids" in prompt and front.config.separator in str(messages):
        raise front.refuse_separator("chat messages are tokenised by the renderer")


def install(module: ModuleType) -> None:
    """Hook one freshly imported vLLM module: its classes act differently only for our engines."""
    if hasattr(module, "InputProcessor"):
        _hook_input_processor(module.InputProcessor)
    if hasattr(module, "OnlineRenderer"):
        _hook_online_renderer(module.OnlineRenderer)


def _hook_input_processor(cls: Any) -> None:
    if hasattr(cls, FIELD):
        return
    cls.tokendance = None
    construct, process = cls.__init__, cls.process_inputs

    @functools.wraps(construct)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, vllm_config, *args, **kwargs)
        if is_ours(vllm_config):
            options = connector_options(vllm_config.kv_transfer_config) or {}
            self.tokendance = _equip(self.renderer, Config.from_mapping(options))

    @functools.wraps(process)
    def process_inputs(
        self: Any,
        request_id: str,
        prompt: Any,
        params: Any,
        supported_tasks: Any,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self.tokendance is not None and isinstance(params, SamplingParams):
            prompt = _rendered(self, prompt, tokenization_kwargs)
            params = self.tokendance.annotate(prompt, params)
        return process(
            self,
            request_id,
            prompt,
            params,
            supported_tasks,
            arrival_time,
            lora_request,
            tokenization_kwargs,
            *args,
            **kwargs,
        )

    cls.__init__ = __init__
    cls.process_inputs = process_inputs


def _hook_online_renderer(cls: Any) -> None:
    if hasattr(cls.preprocess_chat, FIELD):
        return
    chat, completion = cls.preprocess_chat, cls.preprocess_cmpl

    @functools.wraps(chat)
    async def preprocess_chat(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        result = await chat(self, request, *args, **kwargs)
        _check_all(self.renderer, request, result[1])
        return result

    @functools.wraps(completion)
    async def preprocess_cmpl(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        result = await completion(self, request, *args, **kwargs)
        _check_all(self.renderer, request, result)
        return result

    preprocess_chat.tokendance = True  # type: ignore[attr-defined]
    cls.preprocess_chat, cls.preprocess_cmpl = preprocess_chat, preprocess_cmpl


def _check_all(renderer: Any, request: Any, engine_inputs: Sequence[Any]) -> None:
    front = getattr(renderer, FIELD, None)
    if front is not None:
        for engine_input in engine_inputs:
            front.check(engine_input, getattr(request, "kv_transfer_params", None))


def _equip(renderer: Any, config: Config) -> FrontEnd:
    """Let an engine's renderer understand separators."""
    if hasattr(renderer, FIELD):
        return cast(FrontEnd, renderer.tokendance)
    front = FrontEnd(config, renderer.tokenizer)
    renderer.__class__ = _round_class(type(renderer))
    renderer.tokendance = front
    # Bound to the old class when the renderer was made.
    renderer._tokenize_prompt_async = make_async(
        renderer._tokenize_prompt, executor=renderer._executor
    )
    return front


def _rendered(processor: Any, prompt: Any, tokenization_kwargs: dict[str, Any] | None) -> Any:
    """A raw prompt rendered as InputProcessor would itself."""
    if isinstance(prompt, dict) and "type" in prompt:
        return prompt
    renderer = processor.renderer
    parsed = parse_model_prompt(processor.model_config, prompt)
    tok_params = renderer.default_cmpl_tok_params.with_kwargs(**(tokenization_kwargs or {}))
    (engine_input,) = renderer.render_cmpl([parsed], tok_params)
    return engine_input


def _client_error(error: HintError) -> VLLMValidationError:
    where = f"kv_transfer_params.{FIELD}"
    parameter = where if error.field == FIELD else f"{where}.{error.field}"
    return VLLMValidationError(str(error), parameter=parameter, value=error.value)


def _with_transfer(params: SamplingParams, transfer: dict[str, Any]) -> SamplingParams:
    """A shallow copy with other kv_transfer_params: the caller may share `params`."""
    annotated = copy.copy(params)
    annotated.extra_args = {**(params.extra_args or {}), "kv_transfer_params": transfer}
    return annotated
