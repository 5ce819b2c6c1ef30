#!/usr/bin/env python3
"""Makes models/prefixgate-demo, the project's own small tokenizer: byte-level BPE trained on corpus.txt.

It serves the demo, the simulated replicas and the tests, so that none of them needs a download. The chat template beside
it is written by hand. Training is deterministic: the same corpus and the same version of the library give the same file.

    pip install tokenizers==0.22.2 && scripts/train-tokenizer/train.py
"""

import json
import pathlib

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

HERE = pathlib.Path(__file__).resolve().parent
OUT = HERE.parent.parent / "models" / "prefixgate-demo"

VOCAB_SIZE = 4096
# Marks of the chat template, then spare ones, so that a new mark does not move the ids of the text.
SPECIAL = [
    "<|pg_end_of_text|>",
    "<|pg_role|>",
    "<|pg_text|>",
    "<|pg_end|>",
    "<|pg_image|>",
    "<|pg_pad|>",
    "<|pg_spare_0|>",
    "<|pg_spare_1|>",
]
# Found in text like the marks above, but part of what the model says: not hidden when it is printed.
PLAIN = ["<pg_tool_call>", "</pg_tool_call>"]

# Words with the mark before them, numbers in groups of three digits, runs of punctuation with the line ends after
# them, line ends, other white space: the way large models of today cut text.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def main() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    corpus = (HERE / "corpus.txt").read_text(encoding="utf-8")
    tokenizer.train_from_iterator(corpus.split("\n\n"), trainer)
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in PLAIN])

    OUT.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(OUT / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 131072,
        "bos_token": None,
        "eos_token": "<|pg_end|>",
        "pad_token": "<|pg_pad|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
    }
    (OUT / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    print(f"{tokenizer.get_vocab_size()} entries in {OUT}")


if __name__ == "__main__":
    main()
