"""One projection under a treatment: what is frozen is a buffer, what ever trains is a parameter."""

import torch
from torch import Tensor, nn

from oelm.kernels.functions import linear, low_rank
from oelm.methods import PARAMETER_FREE, Treatment
from oelm.projections import channel_order, make, matched, stream


class Projection(nn.Module):
    """y = gain · (x Wᵀ + (x Aᵀ) Bᵀ) + bias with x = input gain · input, a drop-in for `nn.Linear`.

    W never trains → a buffer: no gradient, no optimizer state, no decay, no all-reduce.
    W trains late or every N steps → a parameter, opened and closed by `oelm.freezing.Gates`.
    Some heads frozen → their rows are `frozen_weight`, the others `weight`.
    W an identity → no tensor and no product: head h reads its slice of x.
    """

    weight: Tensor | None
    frozen_weight: Tensor | None
    bias: Tensor | None
    order: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        treatment: Treatment,
        *,
        heads: int = 1,
        layer: int = 0,
        n_layers: int = 1,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.treatment, self.heads = treatment, heads
        self.frozen = treatment.frozen_in(layer, n_layers)
        self.trains_from = treatment.trains_from(layer, n_layers)
        self.every = treatment.every or 1

        frozen_rows = treatment.frozen_heads(heads) * (out_features // heads)
        if self.frozen:
            frozen_rows = 0  # the whole matrix is one buffer, called `weight` as anywhere else
        has_matrix = treatment.init not in PARAMETER_FREE
        weight = torch.empty(out_features - frozen_rows, in_features) if has_matrix else None
        self._keep("weight", weight, frozen=self.frozen)
        frozen_weight = torch.empty(frozen_rows, in_features) if frozen_rows else None
        self._keep("frozen_weight", frozen_weight, frozen=True)
        shuffled = treatment.init == "identity_shuffle"
        order = torch.empty(out_features, dtype=torch.long) if shuffled else None
        self.register_buffer("order", order)
        # A bias of the model's own goes with its matrix; one that the method adds always trains.
        has_bias = (bias and has_matrix) or treatment.bias
        frozen_bias = self.frozen and not treatment.bias
        self._keep("bias", torch.empty(out_features) if has_bias else None, frozen=frozen_bias)
        self.gain = nn.Parameter(torch.empty(out_features)) if treatment.gain else None
        self.input_gain = nn.Parameter(torch.empty(in_features)) if treatment.input_gain else None
        rank = treatment.rank
        self.low_rank_in = nn.Parameter(torch.empty(rank, in_features)) if rank else None
        self.low_rank_out = nn.Parameter(torch.empty(out_features, rank)) if rank else None

    def _keep(self, name: str, value: Tensor | None, *, frozen: bool) -> None:
        if value is None or frozen:
            self.register_buffer(name, value)
        else:
            self.register_parameter(name, nn.Parameter(value))

    def init_weights(self, name: str, seed: int, frozen_seed: int, std: float) -> None:
        """Fill every tensor from the stream of its name; frozen ones from `frozen_seed`.

        W as its init says (`normal` uses `std`) · A normal(1/√in) · B 0 · gains 1 · bias 0.
        """
        whole = (self.out_features, self.in_features)
        own_seed = frozen_seed if self.frozen else seed
        t = self.treatment
        with torch.no_grad():
            if self.weight is not None and t.init != "keep":
                # One draw for the whole matrix, so that freezing some heads changes no value.
                value = make(
                    t.init,
                    whole,
                    heads=self.heads,
                    seed=own_seed,
                    name=name,
                    scale=t.scale,
                    std=std,
                )
                rows = 0 if self.frozen_weight is None else len(self.frozen_weight)
                if self.frozen_weight is not None:
                    self.frozen_weight.copy_(value[:rows])
                self.weight.copy_(value[rows:])
            if self.order is not None:
                self.order.copy_(torch.from_numpy(channel_order(whole, stream(frozen_seed, name))))
            if self.bias is not None and t.init != "keep":
                self.bias.zero_()
            for gain in (self.gain, self.input_gain):
                if gain is not None:
                    gain.fill_(1.0)
            if self.low_rank_in is not None and self.low_rank_out is not None:
                a = stream(seed, f"{name}.low_rank")
                shape = (len(self.low_rank_in), self.in_features)
                self.low_rank_in.copy_(torch.from_numpy(matched(shape, 1, a)))
                self.low_rank_out.zero_()

    def adopt(self, weight: Tensor, bias: Tensor | None) -> None:
        """Take over the matrix [out, in] and the bias that a loaded model came with, times `scale`."""
        assert self.weight is not None
        with torch.no_grad():
            rows = 0 if self.frozen_weight is None else len(self.frozen_weight)
            if self.frozen_weight is not None:
                self.frozen_weight.copy_(weight[:rows] * self.treatment.scale)
            self.weight.copy_(weight[rows:] * self.treatment.scale)
            if self.bias is not None and bias is not None:
                self.bias.copy_(bias)

    def forward(self, x: Tensor) -> Tensor:
        """[…, in] → […, out]."""
        plain = self.gain is None and self.low_rank_in is None and self.frozen_weight is None
        if self.input_gain is not None:
            x = x * self.input_gain
        if self.weight is None:
            y = self._read(x)
        elif plain:
            return linear(x, self.weight, self.bias)
        elif self.frozen_weight is not None:
            y = torch.cat([linear(x, self.frozen_weight), linear(x, self.weight)], dim=-1)
        else:
            y = linear(x, self.weight)
        if self.low_rank_in is not None and self.low_rank_out is not None:
            y = low_rank(x, self.low_rank_in, self.low_rank_out, base=y)
        if self.gain is not None:
            y = y * self.gain
        return y if self.bias is None else y + self.bias

    @property
    def simple(self) -> bool:
        """Whether it is no more than a matrix with a bias, or an identity, and a low-rank update."""
        if self.frozen_weight is not None or self.gain is not None or self.input_gain is not None:
            return False
        reads_all = self.treatment.scale == 1 and self.in_features == self.out_features
        return self.weight is not None or (reads_all and self.bias is None)

    @property
    def ahead(self) -> int:
        """By how many channels an identity begins further on."""
        return self.out_features // self.heads if self.treatment.init == "identity_shift" else 0

    def merged(self) -> tuple[Tensor, Tensor | None]:
        """The whole projection as one matrix [out, in] and one bias."""
        if self.weight is None:
            matrix = self._read(torch.eye(self.in_features)).T
        elif self.frozen_weight is not None:
            matrix = torch.cat([self.frozen_weight, self.weight])
        else:
            matrix = self.weight
        if self.low_rank_in is not None and self.low_rank_out is not None:
            matrix = matrix + self.low_rank_out @ self.low_rank_in
        if self.gain is not None:
            matrix = matrix * self.gain[:, None]
        if self.input_gain is not None:
            matrix = matrix * self.input_gain
        return matrix, self.bias

    def _read(self, x: Tensor) -> Tensor:
        """The slices of x that an identity projection reads; a view where it can be one."""
        if self.order is not None:
            y = x.index_select(-1, self.order)
        elif self.treatment.init == "identity_shift":
            y = x.roll(-self.ahead, dims=-1)[..., : self.out_features]
        else:
            y = x[..., : self.out_features]
        return y if self.treatment.scale == 1 else y * self.treatment.scale

    def extra_repr(self) -> str:
        """Shown by `print(model)`."""
        state = "frozen" if self.frozen else self.treatment.trains
        return (
            f"{self.in_features}, {self.out_features}, init={self.treatment.init}, trains={state}"
        )
