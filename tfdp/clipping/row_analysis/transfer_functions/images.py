"""Operations on images, as random augmentations use them."""

import tensorflow as tf

from tfdp.clipping.row_analysis.analysis import mixes, transfers, unproven
from tfdp.clipping.row_analysis.states import Public, Rows, State
from tfdp.clipping.row_analysis.transfer_functions.common import constant_along, of_rows


@transfers("ImageProjectiveTransformV2", "ImageProjectiveTransformV3")
def projective_transform(op: tf.Operation, inputs: list[State]) -> State:
    """Rotations, shifts and zooms: one transform for each image, or one for all."""
    images, transforms, *others = inputs
    if images != Rows() or op.inputs[1].shape.rank != 2:
        return unproven(op, f"{op.inputs[0].name} is not proven to hold the examples")
    length = op.inputs[0].shape[0]
    own = transforms == Rows()
    if not own and not (isinstance(transforms, Public) and constant_along(op.inputs[1], 0, length)):
        return unproven(op, "its transforms may differ from row to row")
    if not all(isinstance(state, Public) for state in others):
        return unproven(op, "what it makes of an image may depend on the batch")
    return images


@of_rows("AdjustContrastv2")
def contrast(op: tf.Operation, rows: Rows, inputs: list[State]) -> State:
    """Handles differences from the mean of each image's channels: its last three axes."""
    if rows.axis >= op.inputs[0].shape.rank - 3:
        raise mixes(op, "it takes the mean over the batch")
    return rows


@of_rows("AdjustHue", "AdjustSaturation", "HSVToRGB", "RGBToHSV")
def colors(op: tf.Operation, rows: Rows, inputs: list[State]) -> State:
    """Functions of each pixel: of the entries along the last axis."""
    if rows.axis == op.inputs[0].shape.rank - 1:
        raise mixes(op, "it takes the batch for the colors of a pixel")
    return rows
