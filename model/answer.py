"""An answer's text to the message it is: thinking, content and tool calls, taken apart by ``deepseek-recipe``."""

import json
from typing import Any

import deepseek_recipe as recipe


def parse_answer(
    text: str, *, thinking: bool, in_calls: bool, is_whole: bool, call_prefix: str
) -> tuple[dict[str, Any], bool]:
    """The message of a chat completion, and whether the answer is a call of tools.

    thinking: the prompt has opened the thinking. in_calls: it has opened a block of tool calls. is_whole: the answer
    ended by itself; otherwise what it broke off in is given as far as it came. Calls are named `call_prefix` and their
    number, so that they are the same on every run.
    """
    version = recipe.ModelVersion.DeepseekV41Flash
    request = recipe.ConversationRequest(recipe.Conversation(thinking_mode=thinking), version)
    start = recipe.ThinkingInitialStage.ReasoningStart if thinking else None
    processor = recipe.StreamProcessor(
        recipe.ChatCompletionRequest.chunk_generator(request, "", ""),
        recipe.ParsingOptions(starts_in_tool_calls=in_calls, thinking_initial_stage=start),
    )
    reasons = recipe.InferenceFinishReason
    finish = reasons.Stop if is_whole else reasons.Length
    response = recipe.ChatCompletionResponse("", "", 0, 0, 0)
    chunk = recipe.InferenceChunk
    for part in (chunk.ready(), chunk.text(text), chunk.finish(finish)):
        for piece in processor.push(part):
            response.accumulate(piece)  # pyright: ignore[reportArgumentType]  # chat chunks of a chat generator
    for piece in processor.finish():
        response.accumulate(piece)  # pyright: ignore[reportArgumentType]
    choice = json.loads(response.to_json())["choices"][0]
    message: dict[str, Any] = choice["message"]
    for number, call in enumerate(message.get("tool_calls") or ()):
        call["id"] = f"{call_prefix}{number}"
        del call["index"]
    return message, choice["finish_reason"] == "tool_calls"
