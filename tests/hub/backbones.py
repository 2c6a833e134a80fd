"""Small tasks of KerasHub with random weights, made in code, and data for them.

`BACKBONES` has one for each family of backbones that can be built small. Dropout is off, so that a
step can be compared with a loop over examples.
"""

import dataclasses
import functools
import io
from collections.abc import Callable
from typing import Any

import keras
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
PATCHES = {"patch_size": 16, "image_shape": (SIDE, SIDE, 3)}
CODERS, COUNTS = ("encoder", "decoder"), {"layers": 1, "heads": 2}
AMINO = list("LAGVSERTIDPKQNFYMHWC")
PROTEINS = np.array(["".join(RNG.choice(AMINO, 8)) for _ in range(EXAMPLES)])
PIXELS = RNG.uniform(size=[EXAMPLES, SIDE, SIDE, 3]).astype("float32")
MASKS = RNG.integers(0, CLASSES, [EXAMPLES, SIDE, SIDE])
VIDEOS = RNG.uniform(size=[EXAMPLES, 2, SIDE, SIDE, 3]).astype("float32")
TOKENS = RNG.integers(5, 60, [EXAMPLES, LENGTH])
ONES = np.ones_like(TOKENS)
INPUTS = {"token_ids": TOKENS, "padding_mask": ONES}
SEGMENTS = {**INPUTS, "segment_ids": 0 * ONES}
DECODED = {"decoder_token_ids": TOKENS, "decoder_padding_mask": ONES}
ENCODED = {"encoder_token_ids": TOKENS, "encoder_padding_mask": ONES}
SPECTRA = {"encoder_features": RNG.normal(size=[EXAMPLES, SIDE, 8]).astype("float32")}
SOUNDS = {
    "encoder_input_values": RNG.normal(size=[EXAMPLES, 2048, 1]).astype("float32"),
    "encoder_padding_mask": np.ones([EXAMPLES, 2048], "int64"),
}
POSITIONS = {"position_ids": np.tile(np.arange(LENGTH), [EXAMPLES, 1])}
IMAGE_PIECES = ("<start_of_image>", "<img>", "<end_of_image>")


def _with_head(backbone: Any, units: int, output: str | None = None) -> keras.Model:
    """Returns a backbone and a linear layer on its output, averaged over time or space."""
    x = backbone.output if output is None else backbone.output[output]
    if units == CLASSES and len(x.shape) > 2:
        x = keras.ops.mean(x, axis=[*range(1, len(x.shape) - 1)])
    return keras.Model(backbone.input, keras.layers.Dense(units)(x))


def _small_resnet() -> Any:
    return models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64] * 4,
        stackwise_num_blocks=[1] * 4,
        stackwise_num_strides=[1, 2, 2, 2],
        block_type="basic_block",
        image_shape=(SIDE, SIDE, 3),
    )


def _mit() -> Any:
    return image_task(
        "MiT",
        layerwise_depths=[1, 1],
        num_layers=2,
        layerwise_num_heads=[1, 2],
        layerwise_sr_ratios=[2, 1],
        max_drop_path_rate=0.0,
        layerwise_patch_sizes=[7, 3],
        layerwise_strides=[4, 2],
        hidden_dims=[8, 16],
    )


def _csp_net() -> Any:
    return image_task(
        "CSPNet",
        stem_filters=8,
        stem_kernel_size=3,
        stem_strides=1,
        stackwise_depth=[1, 1],
        stackwise_strides=[1, 2],
        stackwise_num_filters=[8, 16],
        block_type="dark_block",
        stage_type="dark",
    )


def deep_lab() -> Any:
    """Returns a segmenter of images, which has no preprocessor."""
    backbone = models.DeepLabV3Backbone(
        _small_resnet(),
        spatial_pyramid_pooling_key="P4",
        upsampling_size=4,
        dilation_rates=[2],
        low_level_feature_key="P2",
        projection_filters=8,
        image_shape=(SIDE, SIDE, 3),
    )
    task = models.DeepLabV3ImageSegmenter(backbone, num_classes=CLASSES)
    return tfdp.keras3.replace_batch_normalization(task, by="frozen")


def _retina_net() -> Any:
    sizes = {"min_level": 3, "max_level": 4, "use_p5": False}
    backbone = models.RetinaNetBackbone(_small_resnet(), **sizes, image_shape=(SIDE, SIDE, 3))
    model = _with_head(backbone, CLASSES, "P3")
    return tfdp.keras3.replace_batch_normalization(model, by="frozen")


def _dino(version: str, **arguments: Any) -> Any:
    make = getattr(models, f"DINO{version}Backbone")
    return _with_head(make(**PATCHES, **HEADS, use_mask_token=False, **arguments), CLASSES)


def _vit_det() -> Any:
    sizes = {"num_layers": 2, "hidden_size": 16, "intermediate_dim": 32, "num_heads": 2}
    backbone = models.ViTDetBackbone(
        **sizes,
        global_attention_layer_indices=[1],
        image_shape=(SIDE, SIDE, 3),
        patch_size=8,
        num_output_channels=8,
        window_size=2,
    )
    return _with_head(backbone, CLASSES)


def _video_prism() -> Any:
    sizes = {"hidden_dim": 16, "intermediate_dim": 32, "num_heads": 2}
    layers = {"num_spatial_layers": 1, "num_temporal_layers": 1, "num_auxiliary_layers": 0}
    return _with_head(models.VideoPrismBackbone(2, **PATCHES, **sizes, **layers), CLASSES)


def _esm(number: str, kind: str) -> Any:
    tokenizer = models.ESMTokenizer(
        vocabulary=["<cls>", "<pad>", "<eos>", "<unk>", *AMINO, "<mask>"]
    )
    backbone = getattr(models, f"ESM{number}Backbone")(60, **OFF)
    if kind == "MaskedPLM":
        lengths = {"sequence_length": LENGTH, "mask_selection_length": 4}
        return models.ESM2MaskedPLM(
            backbone, preprocessor=models.ESMMaskedPLMPreprocessor(tokenizer, **lengths)
        )
    preprocessor = models.ESMProteinClassifierPreprocessor(tokenizer, sequence_length=LENGTH)
    return models.ESMProteinClassifier(backbone, num_classes=CLASSES, preprocessor=preprocessor)


def _gemma3n() -> Any:
    backbone = models.Gemma3nBackbone(
        text_vocab_size=60,
        text_hidden_size=16,
        num_hidden_layers=2,
        pad_token_id=0,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=[32, 32],
        hidden_activation="gelu_approximate",
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=4,
        rope_theta=1e4,
        max_position_embeddings=32,
        vocab_size_per_layer_input=60,
        hidden_size_per_layer_input=4,
        altup_num_inputs=2,
        laurel_rank=4,
    )
    return _with_head(backbone, 60)


def _gemma4() -> Any:
    windows = {"sliding_window_size": 4, "sliding_window_pattern": 2}
    sizes = {**SMALL_HEADS, "num_layers": 2}
    return _with_head(models.Gemma4Backbone(60, image_size=SIDE, **sizes, **windows), 60)


def _qwen_next() -> Any:
    linear = {f"linear_num_{part}_heads": 2 for part in ("key", "value")}
    linear |= {f"linear_{part}_head_dim": 8 for part in ("key", "value")}
    layers = {**SMALL_HEADS, "num_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    return _with_head(models.Qwen3_5Backbone(60, **layers, **linear), 60)


def _rwkv() -> Any:
    sizes = {"hidden_size": 16, "head_size": 8, "num_layers": 2, "intermediate_dim": 32}
    lora = {f"{part}_lora": 4 for part in ("gate", "mv", "aaa", "decay")}
    return _with_head(models.RWKV7Backbone(vocabulary_size=60, **sizes, **lora), 60)


def _electra() -> Any:
    backbone = models.ElectraBackbone(60, **OFF, embedding_dim=8)
    return _with_head(backbone, CLASSES, "pooled_output")


def _decoder(backbone: Any) -> Any:
    return _with_head(backbone, 60, "decoder_sequence_output")


def _whisper() -> Any:
    lengths = {"max_encoder_sequence_length": 32, "max_decoder_sequence_length": LENGTH}
    return _decoder(models.WhisperBackbone(60, **HEADS, num_mels=8, **lengths))


def _moonshine() -> Any:
    layers = {f"{part}_num_{count}": n for part in CODERS for count, n in COUNTS.items()}
    sizes = {"hidden_dim": 16, "intermediate_dim": 32}
    return _decoder(models.MoonshineBackbone(60, filter_dim=16, **sizes, **layers))


def _ed_rec() -> Any:
    return _decoder(models.EdRecBackbone(60, 1, 1, 16, 32, 2))


def _t5_gemma(name: str) -> Backbone:
    part = {
        "hidden_dim": 16,
        "intermediate_dim": 32,
        "num_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "layer_types": ["full_attention"],
    }
    sizes = {f"{coder}_{size}": value for coder in CODERS for size, value in part.items()}

    def make() -> Any:
        return text_task(name, "Seq2SeqLM", _sentence_piece(name, "<bos>", "<eos>"), **sizes)

    return Backbone("sequence-to-sequence model", make, SEQ2SEQ)


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

# The other families, most of them as a backbone with a linear head, on arrays.
BACKBONES |= {
    "DistilBert, masked": Backbone(
        "masked language model",
        lambda: text_task("DistilBert", "MaskedLM", _word_piece("DistilBert"), **OFF),
        TEXTS,
    ),
    "Electra": Backbone("text classifier", _electra, (SEGMENTS, LABELS)),
    "XLNet": Backbone(
        "text classifier",
        lambda: _with_head(models.XLNetBackbone(60, **HEADS), CLASSES),
        (SEGMENTS, LABELS),
    ),
    "ESM": Backbone("classifier of proteins", lambda: _esm("", ""), (PROTEINS, LABELS)),
    "ESM2": Backbone("masked language model", lambda: _esm("2", "MaskedPLM"), PROTEINS),
    "Gemma3": Backbone(
        "causal language model",
        lambda: text_task(
            "Gemma3",
            "CausalLM",
            _sentence_piece("Gemma3", "<bos>", "<eos>", "<mask>", *IMAGE_PIECES),
            **SMALL_HEADS,
            image_size=SIDE,
        ),
        {"prompts": TEXTS, "responses": TEXTS},
    ),
    "Gemma3n": Backbone("causal language model", _gemma3n, (INPUTS, TOKENS)),
    "Gemma4": Backbone("causal language model", _gemma4, ({**INPUTS, **POSITIONS}, TOKENS)),
    "GptOss": _language_model("GptOss", _pairs("GptOss"), **QUERIES, num_experts=2, top_k=1),
    "Qwen3.5": Backbone("causal language model", _qwen_next, (INPUTS, TOKENS)),
    "RWKV7": Backbone("causal language model", _rwkv, (INPUTS, TOKENS)),
    "T5Gemma": _t5_gemma("T5Gemma"),
    "T5Gemma2": _t5_gemma("T5Gemma2"),
    "EdRec": Backbone("sequence-to-sequence model", _ed_rec, ({**ENCODED, **DECODED}, TOKENS)),
    "Whisper": Backbone("speech to text", _whisper, ({**SPECTRA, **DECODED}, TOKENS)),
    "Moonshine": Backbone("speech to text", _moonshine, ({**SOUNDS, **DECODED}, TOKENS)),
    "MiT": _images(_mit),
    "CSPNet": _images(_csp_net),
    "DINOV2": Backbone(
        "image classifier",
        lambda: _dino("V2", position_embedding_shape=(64, 64, 3)),
        (PIXELS, LABELS),
    ),
    "DINOV3": Backbone("image classifier", lambda: _dino("V3"), (PIXELS, LABELS)),
    "ViTDet": Backbone("image classifier", _vit_det, (PIXELS, LABELS)),
    "RetinaNet": Backbone("image classifier", _retina_net, (PIXELS, LABELS)),
    "DeepLabV3": Backbone("image segmenter", deep_lab, (PIXELS, np.eye(CLASSES)[MASKS])),
    "VideoPrism": Backbone("video classifier", _video_prism, (VIDEOS, LABELS)),
}
