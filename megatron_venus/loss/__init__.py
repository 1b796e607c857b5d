"""From the model's output rows to a summed loss: log-probs in chunks, objectives, corrections, KL, sums.

Pure torch, one micro-batch at a time; nothing here divides by a batch's denominator. Called by the gradient stream.
"""

from megatron_venus.loss.log_probs import token_log_probs
from megatron_venus.loss.token_loss import LossTokens, TokenSums, batch_loss

__all__ = ["LossTokens", "TokenSums", "batch_loss", "token_log_probs"]
