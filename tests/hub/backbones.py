"""Small tasks of KerasHub with random weights, made in code, and data for them.

`BACKBONES` has one for each family of backbones that can be built small. Dropout is off, so that a
step can be compared with a loop over examples.
"""

import dataclasses
import functools
import io
from collections.abc import Callable
from typing import Any

import keras_hub
import numpy as np
import sentencepiece

import tfdp

models, tokenizers, converters = keras_hub.models, keras_hub.tokenizers, keras_hub.layers

EXAMPLES, LENGTH, SIDE, CLASSES = 40, 12, 32, 3
WORDS = ["the", "cat", "dog", "sat", "on", "mat", "good", "bad", "film", "was", "very"]
RNG = np.random.default_rng(0)
TEXTS = np.array([" ".join(RNG.choice(WORDS, RNG.integers(3, 9))) for _ in range(EXAMPLES)])
LABELS = RNG.integers(0, CLASSES, EXAMPLES)
IMAGES = RNG.integers(0, 255, [EXAMPLES, 24, 28, 3]).astype("uint8")
WORD_PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
SIZES = {"num_layers": 1, "hidden_dim": 16, "intermediate_dim": 32}
HEADS = {**SIZES, "num_heads": 2}
QUERIES = {**SIZES, "num_query_heads": 2, "num_key_value_heads": 1}


@functools.cache
def byte_pairs() -> tuple[dict[str, int], list[str]]:
    """Returns a vocabulary in which each word is a token, and its merges."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>", "<|begin_of_text|>"]
    special += ["<|end_of_text|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"]
    special += ["<|start_header_id|>", "<|end_header_id|>", "<think>", "</think>"]
    vocabulary, merges = {token: number for number, token in enumerate(special)}, []
    for word in [form for known in WORDS for form in (known, "Ġ" + known)]:
        for letter in word:
            vocabulary.setdefault(letter, len(vocabulary))
        for end in range(1, len(word)):
            merges.append(f"{word[:end]} {word[end]}")
            vocabulary.setdefault(word[: end + 1], len(vocabulary))
    return vocabulary, list(dict.fromkeys(merges))


@functools.cache
def sentence_pieces(
    begin: str = "<s>", end: str = "</s>", mask: str = "<mask>", *special: str, pad: str = "<pad>"
) -> bytes:
    """Returns a model of SentencePiece."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS.tolist()),
        model_writer=model,
        vocab_size=40,
        model_type="WORD",
        hard_vocab_limit=False,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        pad_piece=pad,
        bos_piece=begin,
        eos_piece=end,
        unk_piece="<unk>",
        user_defined_symbols=[mask, "<|endoftext|>", *special],
        minloglevel=2,
    )
    return model.getvalue()


def _byte_pair(name: str) -> Any:
    vocabulary, merges = byte_pairs()
    return getattr(tokenizers, f"{name}Tokenizer")(vocabulary=vocabulary, merges=merges)


def _word_piece(name: str) -> Any:
    return getattr(tokenizers, f"{name}Tokenizer")(vocabulary=WORD_PIECES, lowercase=True)


def _sentence_piece(name: str, *pieces: str, **pad: str) -> Any:
    return getattr(tokenizers, f"{name}Tokenizer")(proto=sentence_pieces(*pieces, **pad))


def text_task(name: str, kind: str, tokenizer: Any, **arguments: Any) -> Any:
    """Returns a task of texts, a "TextClassifier", "CausalLM", "MaskedLM" or "Seq2SeqLM"."""
    size = max(tokenizer.vocabulary_size(), 60)
    backbone = getattr(models, f"{name}Backbone")(vocabulary_size=size, **arguments)
    lengths = {"sequence_length": LENGTH}
    if kind == "MaskedLM":
        lengths["mask_selection_length"] = 4
    if kind == "Seq2SeqLM":
        lengths = {"encoder_sequence_length": LENGTH, "decoder_sequence_length": LENGTH}
    preprocessor = getattr(models, f"{name}{kind}Preprocessor")(tokenizer, **lengths)
    head = {"num_classes": CLASSES, "dropout": 0.0} if kind == "TextClassifier" else {}
    return getattr(models, name + kind)(backbone=backbone, preprocessor=preprocessor, **head)


def image_task(name: str, **arguments: Any) -> Any:
    """Returns a classifier of images; BatchNormalization is frozen."""
    shape = "input_shape" if name == "EfficientNet" else "image_shape"
    backbone = getattr(models, f"{name}Backbone")(**{shape: (SIDE, SIDE, 3)}, **arguments)
    converter = getattr(converters, f"{name}ImageConverter")(
        image_size=(SIDE, SIDE), scale=1 / 255.0
    )
    preprocessor = getattr(models, f"{name}ImageClassifierPreprocessor")(image_converter=converter)
    make = getattr(models, f"{name}ImageClassifier")
    task = make(backbone, num_classes=CLASSES, preprocessor=preprocessor)
    return tfdp.keras3.replace_batch_normalization(task, by="frozen")


def bert(kind: str = "TextClassifier", **arguments: Any) -> Any:
    return text_task("Bert", kind, _word_piece("Bert"), **{**HEADS, "dropout": 0, **arguments})


def gpt2(**arguments: Any) -> Any:
    return text_task("GPT2", "CausalLM", _byte_pair("GPT2"), **{**HEADS, "dropout": 0, **arguments})


def bart() -> Any:
    return text_task("Bart", "Seq2SeqLM", _byte_pair("Bart"), **HEADS, dropout=0)


def _t5() -> Any:
    return text_task("T5", "Seq2SeqLM", _sentence_piece("T5"), **HEADS, dropout=0)


def vit() -> Any:
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
    return image_task("ViT", patch_size=16, **sizes)


def resnet() -> Any:
    return image_task(
        "ResNet",
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64, 64],
        stackwise_num_blocks=[1, 1],
        stackwise_num_strides=[1, 2],
        block_type="basic_block",
    )


def _efficient_net() -> Any:
    return image_task(
        "EfficientNet",
        stackwise_kernel_sizes=[3, 5],
        stackwise_num_repeats=[1, 1],
        stackwise_input_filters=[8, 8],
        stackwise_output_filters=[8, 16],
        stackwise_expansion_ratios=[1, 4],
        stackwise_squeeze_and_excite_ratios=[0.25, 0.25],
        stackwise_strides=[1, 2],
        stackwise_block_types=["v1", "v1"],
        stackwise_width_coefficients=[1.0, 1.0],
        stackwise_depth_coefficients=[1.0, 1.0],
        stackwise_force_input_filters=[0, 0],
        stackwise_nores_option=[False, False],
        dropout=0.0,
    )


def _mobile_net() -> Any:
    return image_task(
        "MobileNet",
        stackwise_expansion=[[8], [16]],
        stackwise_num_blocks=[1, 1],
        stackwise_num_filters=[[8], [16]],
        stackwise_kernel_size=[[3], [3]],
        stackwise_num_strides=[[1], [2]],
        stackwise_se_ratio=[[0.25], [0.25]],
        stackwise_activation=[["relu"], ["hard_swish"]],
        stackwise_padding=[[1], [1]],
        output_num_filters=32,
        depthwise_filters=8,
        depthwise_stride=2,
        depthwise_residual=False,
        last_layer_filter=16,
        input_num_filters=8,
    )


def _hg_net() -> Any:
    return image_task(
        "HGNetV2",
        depths=[1, 1],
        embedding_size=8,
        hidden_sizes=[16, 32],
        stem_channels=[3, 8, 8],
        hidden_act="relu",
        use_learnable_affine_block=False,
        stackwise_stage_filters=[[8, 8, 16, 1, 2, 3], [16, 8, 32, 1, 2, 3]],
        apply_downsample=[False, True],
        use_lightweight_conv_block=[False, False],
    )


def _swin() -> Any:
    sizes = {"embed_dim": 8, "depths": [2, 1], "num_heads": [1, 2], "window_size": 4}
    return image_task("SwinTransformer", patch_size=2, drop_path=0.0, **sizes)


@dataclasses.dataclass(frozen=True)
class Backbone:
    """A family of backbones.

    Attributes:
      kind: What is trained.
      make: Makes a small task, or a model of the backbone.
      data: The argument `data` of `make_private`.
    """

    kind: str
    make: Callable[[], Any]
    data: Any


def _classifier(name: str, tokenizer: Callable[[], Any], **arguments: Any) -> Backbone:
    def make() -> Any:
        return text_task(name, "TextClassifier", tokenizer(), **arguments)

    return Backbone("text classifier", make, (TEXTS, LABELS))


def _language_model(name: str, tokenizer: Callable[[], Any], **arguments: Any) -> Backbone:
    def make() -> Any:
        return text_task(name, "CausalLM", tokenizer(), **arguments)

    return Backbone("causal language model", make, TEXTS)


def _pieces(name: str, *pieces: str, **pad: str) -> Callable[[], Any]:
    return functools.partial(_sentence_piece, name, *pieces, **pad)


def _pairs(name: str) -> Callable[[], Any]:
    return functools.partial(_byte_pair, name)


def _images(make: Callable[[], Any]) -> Backbone:
    return Backbone("image classifier", make, (IMAGES, LABELS))


BRACKETS = ("[CLS]", "[SEP]", "[MASK]")
OFF = {**HEADS, "dropout": 0}
SMALL_HEADS = {**QUERIES, "head_dim": 8}
SMOL = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_layer_enabled_list": [True],
    "layer_types": ["full_attention"],
    "mlp_bias": False,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 32,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
}
SEQ2SEQ = {"encoder_text": TEXTS, "decoder_text": TEXTS[::-1].copy()}

BACKBONES = {
    "Bert": Backbone("text classifier", bert, (TEXTS, LABELS)),
    "DistilBert": _classifier("DistilBert", lambda: _word_piece("DistilBert"), **OFF),
    "Roberta": _classifier("Roberta", _pairs("Roberta"), **OFF),
    "XLMRoberta": _classifier("XLMRoberta", _pieces("XLMRoberta"), **OFF),
    "DebertaV3": _classifier(
        "DebertaV3", _pieces("DebertaV3", *BRACKETS, pad="[PAD]"), **OFF, bucket_size=4
    ),
    "Albert": _classifier("Albert", _pieces("Albert", *BRACKETS), **OFF, embedding_dim=8),
    "FNet": _classifier("FNet", _pieces("FNet", *BRACKETS), **SIZES, dropout=0),
    "RoformerV2": _classifier("RoformerV2", lambda: _word_piece("RoformerV2"), **OFF, head_size=8),
    "Bert, masked": Backbone("masked language model", lambda: bert("MaskedLM"), TEXTS),
    "GPT2": Backbone("causal language model", gpt2, TEXTS),
    "GPTNeoX": _language_model("GPTNeoX", _pairs("GPTNeoX"), **OFF),
    "OPT": _language_model("OPT", _pairs("OPT"), **OFF),
    "Bloom": _language_model("Bloom", _pairs("Bloom"), **OFF),
    "Falcon": _language_model("Falcon", _pairs("Falcon"), **SIZES, num_attention_heads=2),
    "Llama": _language_model("Llama", _pieces("Llama"), **QUERIES),
    "Llama3": _language_model("Llama3", _pairs("Llama3"), **QUERIES),
    "Mistral": _language_model("Mistral", _pieces("Mistral"), **QUERIES),
    "Mixtral": _language_model("Mixtral", _pieces("Mixtral"), **QUERIES, num_experts=2),
    "Phi3": _language_model("Phi3", _pieces("Phi3"), **QUERIES),
    "Qwen": _language_model("Qwen", _pairs("Qwen"), **QUERIES),
    "Qwen3": _language_model("Qwen3", _pairs("Qwen3"), **SMALL_HEADS),
    "SmolLM3": _language_model("SmolLM3", _pairs("SmolLM3"), **SIZES, **SMOL),
    "Gemma": _language_model("Gemma", _pieces("Gemma", "<bos>", "<eos>"), **SMALL_HEADS),
    "Bart": Backbone("sequence-to-sequence model", bart, SEQ2SEQ),
    "T5": Backbone("sequence-to-sequence model", _t5, SEQ2SEQ),
    "ViT": _images(vit),
    "DeiT": _images(lambda: image_task("DeiT", patch_size=16, **HEADS)),
    "SwinTransformer": _images(_swin),
    "ResNet": _images(resnet),
    "EfficientNet": _images(_efficient_net),
    "MobileNet": _images(_mobile_net),
    "DenseNet": _images(
        lambda: image_task("DenseNet", stackwise_num_repeats=[2, 2], growth_rate=4)
    ),
    "VGG": _images(
        lambda: image_task("VGG", stackwise_num_repeats=[1, 1], stackwise_num_filters=[8, 16])
    ),
    "HGNetV2": _images(_hg_net),
    "Xception": _images(
        lambda: image_task(
            "Xception",
            stackwise_conv_filters=[[8, 8], [16, 16]],
            stackwise_pooling=[True, False],
        )
    ),
}
