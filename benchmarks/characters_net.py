"""The network of `benchmarks.characters`: a small GPT."""

import math

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

#: of the weights of matrices and embeddings at their start
START = 0.02


class Block(nn.Module):
    """Attention and a perceptron, each on normalised inputs, added."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        parts = self.inner(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.view(B, T, self.heads, D // self.heads).transpose(1, 2) for part in parts)
        rate = self.dropout if self.training else 0.0
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=rate)
        x = x + self.drop(self.outer(mixed.transpose(1, 2).reshape(B, T, D)))
        return x + self.perceptron(self.norms[1](x))


class GPT(nn.Module):
    """[B, T] characters → [B, V, T] logits of each next one.

    Args:
        letters: V.
        width, heads, layers, dropout: of its blocks.
        length: the largest T.
    """

    def __init__(self, letters: int, width: int, heads: int, layers: int, length: int, dropout: float):
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, width), nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                deep = name.endswith(("outer.weight", "perceptron.2.weight"))
                nn.init.normal_(parameter, std=START / (math.sqrt(2 * layers) if deep else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        places = self.places.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(self.drop(self.letters(x) + places)))).movedim(-1, 1)
