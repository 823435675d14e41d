"""
`python make_inputs.py FOLDER`: what a job reads, so small that a CPU trains it in no time.

FOLDER/model        a random Qwen2 of one layer with its own tokenizer (readable text, ChatML, hermes tool calls)
FOLDER/train.parquet, FOLDER/val.parquet   sums with their results; every second row goes to the tool agent
FOLDER/sft_train.parquet, FOLDER/sft_val.parquet   the same sums as conversations
"""

import itertools
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

TRAIN_ROWS = 16
VAL_ROWS = 4
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = """
{%- macro turn(role, text) %}{{ '<|im_start|>' + role + '\n' + text + '<|im_end|>\n' }}{% endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n<tools>' }}
    {%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- turn('user', '<tool_response>\n' + message.content + '\n</tool_response>') }}
    {%- else %}
        {{- turn(message.role, message.content) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
SAMPLE_TEXT = """
What is 17*24? The answer is 408. I had better compute that. I have no idea. system user assistant # Tools
<tools> {"type": "function", "function": {"name": "calculator", "description": "Multiplies two whole numbers.",
"parameters": {"type": "object", "properties": {"expression": {"type": "string",
"description": "The product to compute, such as 6*7."}}, "required": ["expression"]}}} </tools>
<tool_call> {"name": "calculator", "arguments": {"expression": "3*4"}} </tool_call> <tool_response> </tool_response>
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([SAMPLE_TEXT] * 2, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE.strip(),
    )


def make_model(vocabulary: int) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        eos_token_id=SPECIAL.index("<|im_end|>"),
        pad_token_id=SPECIAL.index("<|endoftext|>"),
    )
    return Qwen2ForCausalLM(config)


def make_rows(first: int, count: int) -> list[dict[str, Any]]:
    agents = itertools.cycle(["single_turn_agent", "tool_agent"])
    return [
        {
            "data_source": "sums",
            "agent_name": agent,
            "prompt": [{"role": "user", "content": f"What is {number}*{number + 7}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(number * (number + 7))},
            "extra_info": {"index": number},
        }
        for number, agent in zip(range(first, first + count), agents, strict=False)
    ]


def make_conversations(first: int, count: int) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                *row["prompt"],
                {"role": "assistant", "content": f"The answer is {row['reward_model']['ground_truth']}."},
            ]
        }
        for row in make_rows(first, count)
    ]


def main(folder: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    make_model(len(tokenizer)).save_pretrained(folder / "model")
    for name, first, count in (("train", 11, TRAIN_ROWS), ("val", 101, VAL_ROWS)):
        pd.DataFrame(make_rows(first, count)).to_parquet(folder / f"{name}.parquet")
        pd.DataFrame(make_conversations(first, count)).to_parquet(folder / f"sft_{name}.parquet")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
