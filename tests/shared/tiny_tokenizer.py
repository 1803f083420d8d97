"""A tiny tokenizer and the sentences it was trained on."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from hf_lohan.testing.models import VOCAB_SIZE

SENTENCES = [f"block {index} goes down to the disk and comes back up when it is its turn" for index in range(40)]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with at most `VOCAB_SIZE` tokens, trained on the sentences."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=["<end>"], show_progress=False)
    bpe.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>")
