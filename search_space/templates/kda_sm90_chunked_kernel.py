"""Kimi Delta Attention on Hopper in chunks of 16 or 32 tokens, two kernels, in CuTe-DSL.

With G_i the inclusive cumulative log decay inside a chunk and S [K, V] the state in fp32 that enters it:

    KW = k e^G   QG = scale q e^G   KG = k e^{G_C − G}   END = e^{G_C}
    L = strictly lower part of Diag(beta) KW (k e^−G)ᵀ     M = lower part of QG (k e^−G)ᵀ
    X = (I + L)⁻¹ Diag(beta)

    U = X (V − KW S);   O = QG S + M U;   S ← Diag(END) S + KGᵀ U

(Kimi Linear, section 3; X and M stay apart from S, so only three products wait for the state. Two do where
`solve` has prepare make W = −X KW in the place of KW: U = X V + W S.)

    prepare     token-parallel, K/2 threads per span of 16 tokens and value head: all but the last line, to
                the workspace as one record per chunk and head (`Plan`)
    recurrence  a block per `value_tile` columns of S, value head and sequence: the last line, records
                through a ring of `stages` slots in shared memory. A warp has 16 columns of S in the
                accumulators of its matrix products, as rows of Sᵀ: all of them, or the keys that are its
                share where `key_warps` work on one strip; those meet once a chunk, for KW S and QG S

32 tokens from its anchor e^−G overflows, so a chunk of two spans has two anchors, at each span's border G_b.
Blocks on the diagonal of L and M are a span's own, rows k e^{G − G_b} against k e^{G_b − G}. So is the block
below, with later rows, earlier keys and the border between them, where neither factor exceeds |k|. Of X that
block is −X₁₁ A X₀₀, with A that of L before beta.

Operands (host tensors): q, k [T, H, K], v, o [T, HV, V] in bf16; g [T, HV, K] and beta [T, HV] fp32 (plain)
or bf16 (production: raw gate, logits); A_log [HV], dt_bias [HV, K] fp32 or None (plain); initial and final
state [N, HV, V, K] fp32, where an empty first extent means "zeros" and "not wanted"; cu_seqlens [N + 1] int32
from 0 on; workspace uint8, `Plan.workspace` bytes. Value head hv reads the q and k of head hv // (HV / H).
Only the first axis may have gaps, in whole heads (beta's in any number); other strides are refused at the
call.

Constraints: `Plan.why_not`, and log decays of at least −5 a token: a span's share one anchor.
Operands of matrix products are rounded to bf16; decays, inverse and state are fp32. Offsets are 64-bit.
"""

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from evotune.search_space.templates.kda_sm90_chunked_plan import (
    ALIGNMENT_BYTES,
    SPAN,
    SQUARE_BYTES,
    TILE,
    WARP,
    Plan,
)

BF16, F32, I32, I64, U8 = cutlass.BFloat16, cutlass.Float32, cutlass.Int32, cutlass.Int64, cutlass.Uint8
LOG2E = 1.4426950408889634
NORM_EPSILON = 1e-6
PIECE = 8  # bf16 values in the 16 bytes that one lane moves


def place(pointer, offset, dtype, count, align):
    """`count` elements at a byte offset, known to be a multiple of `align`, from an aligned byte pointer."""
    if not isinstance(offset, int):
        offset = cute.assume(offset, divby=align)
    return cute.make_tensor(cute.recast_ptr(pointer + offset, dtype=dtype), cute.make_layout(count))


def fragment(pointer, offset, transpose):
    """Four 8 × 8 matrices of bf16 to registers; a lane points to one row of one of them."""
    registers = cute.make_rmem_tensor(PIECE, BF16)
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose, 4), BF16)
    cute.copy(atom, place(pointer, offset, BF16, PIECE, 16), registers)
    return registers


def multiply(acc, left, right):
    """acc (4, 2) += left [16, 16] · rightᵀ [16, 16], for one warp."""
    atom = cute.make_mma_atom(warp.MmaF16BF16Op(BF16, F32, (16, 8, 16)))
    for j in range(2):
        half = cute.make_tensor(right.iterator + 4 * j, cute.make_layout(4))
        cute.mma_atom_call(atom, acc[None, j], left, half, acc[None, j])


def quarter(factors, i):
    """Four neighbouring factors, in 16 bytes."""
    return cute.make_tensor((factors.iterator + i).align(16), cute.make_layout(4))


def columns(acc, s):
    """Block s of 16 columns of accumulators (4, 2 n), as (4, 2)."""
    return cute.make_tensor(acc.iterator + 8 * s, cute.make_layout((4, 2)))


def rounded(acc):
    """Accumulators (4, 2 n) of a product as left operands (8, n) of the next: the same elements, as bf16."""
    size = cute.size(acc)
    left = cute.make_rmem_tensor((PIECE, size // PIECE), BF16)
    left.store(cute.make_tensor(acc.iterator, cute.make_layout((PIECE, size // PIECE))).load().to(BF16))
    return left


def row_stride(m):
    """Elements from a token to the next one: rows may lie apart, as in a slice of a fused projection."""
    return I32(m.stride[0])


def zeros(*shape):
    acc = cute.make_rmem_tensor(shape, F32)
    acc.fill(0.0)
    return acc


class KdaForward:
    """Both kernels of one `Plan`; `build` makes it."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.gate_io = BF16 if plan.production else F32

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (T, H, K)
        mK: cute.Tensor,  # (T, H, K)
        mV: cute.Tensor,  # (T, HV, V)
        mG: cute.Tensor,  # (T, HV, K)
        mBeta: cute.Tensor,  # (T, HV)
        mA,  # (HV) or None
        mBias,  # (HV, K) or None
        mInitial: cute.Tensor,  # (N or 0, HV, V, K)
        mCu: cute.Tensor,  # (N + 1)
        mO: cute.Tensor,  # (T, HV, V)
        mFinal: cute.Tensor,  # (N or 0, HV, V, K)
        mWork: cute.Tensor,  # (bytes)
        N: cutlass.Int64,
        T: cutlass.Int64,
        H: cutlass.Int64,
        HV: cutlass.Int64,
        scale: cutlass.Float32,
        lower_bound: cutlass.Float32,
        stream,
    ):
        p = self.plan
        if N * HV > 0:
            sizes = (I32(N), T, I32(H), I32(HV))
            blocks = I32(p.slots(N, T) * ((HV + (p.units - 1)) // p.units))
            ranked = I32(N) if cutlass.const_expr(p.order == "longest") else I32(0)
            self.prepare(mQ, mK, mG, mBeta, mA, mBias, mCu, mWork, sizes, blocks, scale, lower_bound).launch(
                grid=[blocks + ranked, 1, 1],
                block=[p.prepare_threads, 1, 1],
                stream=stream,
                min_blocks_per_mp=p.prepare_blocks,
                preferred_smem_carveout=100,
            )
            self.recurrence(mV, mInitial, mCu, mO, mFinal, mWork, sizes).launch(
                grid=[I32(N * HV) * p.tiles, 1, 1],
                block=[p.recurrence_threads, 1, 1],
                stream=stream,
                min_blocks_per_mp=p.recurrence_blocks,
                preferred_smem_carveout=100,
                use_pdl=p.start == "early",
            )

    # Prepare

    @cute.kernel
    def prepare(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mG: cute.Tensor,
        mBeta: cute.Tensor,
        mA,
        mBias,
        mCu: cute.Tensor,
        mWork: cute.Tensor,
        sizes,
        blocks: cutlass.Int32,
        scale: cutlass.Float32,
        lower_bound: cutlass.Float32,
    ):
        p = self.plan
        N, T, H, HV = sizes
        tx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        shared = cutlass.memory.SmemAllocator().allocate_tensor(
            U8, cute.make_layout(p.units * p.unit_bytes), byte_alignment=ALIGNMENT_BYTES
        )
        if cutlass.const_expr(p.start == "early"):
            cute.arch.griddepcontrol_launch_dependents()
        if block < blocks:
            groups = (HV + (p.units - 1)) // p.units
            unit = cute.arch.make_warp_uniform(tx // p.unit_threads)
            hv = block % groups * p.units + unit
            slot = block // groups
            if cutlass.const_expr(p.sweep == "backward"):
                slot = blocks // groups - 1 - slot
            t0, valid = self.locate(mCu, N, slot, tx)
            if valid > 0:
                base = shared.iterator + cute.assume(unit * p.unit_bytes, divby=ALIGNMENT_BYTES)
                # Units past the last head work in vain, so that all threads reach the barriers.
                head = cutlass.min(hv, HV - 1)
                rows = (t0, valid, head // (HV // H), head)
                tensors = (mQ, mK, mG, mBeta, mA, mBias)
                self.make_record(tensors, base, rows, scale, lower_bound, tx % p.unit_threads)
                cute.arch.fence_view_async_shared()
                cute.arch.barrier()
                if tx % p.unit_threads == 0 and hv < HV:
                    self.store_record(mWork, base, I64(slot) * HV + hv)
        elif cutlass.const_expr(p.order == "longest"):
            self.rank(mCu, mWork, N, T, HV, block - blocks, shared.iterator, tx)

    @cute.jit
    def locate(self, mCu, N, slot, tx):
        """(first token, tokens) of the chunk in a slot; none where the slot is empty. A search by warps."""
        lane = tx % WARP
        low, span = I32(0), N
        while span > 1:
            step = (span + (WARP - 1)) // WARP
            probe = lane * step
            n = low + cutlass.min(probe, span - 1)
            below = self.plan.first_slot(n, mCu[n]) <= slot
            if probe >= span:
                below = cutlass.Boolean(False)
            skipped = (cute.arch.popc(cute.arch.vote_ballot_sync(below)) - 1) * step
            low = low + skipped
            span = cutlass.min(step, span - skipped)
        begin, end = mCu[low], mCu[low + 1]
        t0 = begin + (slot - self.plan.first_slot(low, begin)) * self.plan.chunk
        return t0, cutlass.min(I32(self.plan.chunk), end - t0)

    @cute.jit
    def make_record(self, tensors, base, rows, scale, lower_bound, tp):
        """The record of one chunk and head at `base`, by K/2 threads a span; each has two channels of it.

        Rows from `valid` on repeat the last one's data; their norm factors and beta are 0 and they do not
        decay, so that they leave o and S alone.
        """
        p = self.plan
        mQ, mK, mG, mBeta, mA, mBias = tensors
        t0, valid, h, hv = rows
        span = cute.arch.make_warp_uniform(tp // p.span_threads) if p.spans > 1 else 0
        pair = tp % p.span_threads  # of channels 2 pair, 2 pair + 1
        lane, w = tp % WARP, cute.arch.make_warp_uniform(tp // WARP)
        left = valid - span * SPAN  # tokens from the span's first on; may be none
        rQ = self.load_pairs(mQ, t0, valid, span, h, pair)
        rK = self.load_pairs(mK, t0, valid, span, h, pair)
        rG = self.load_pairs(mG, t0, valid, span, hv, pair)
        beta = F32(0.0)
        if lane % SPAN < left:
            offset = I64(t0 + span * SPAN + lane % SPAN) * row_stride(mBeta) + hv
            beta = self.beta((mBeta.iterator + offset).load().to(F32))
        slopes, offsets = self.gate_parameters(mA, mBias, hv, pair)
        square = self.squares(rQ, rK, base, lane, w)
        G, end = self.decays(rG, left, slopes, offsets, lower_bound)
        if cutlass.const_expr(p.spans > 1):
            cute.autovec_copy(end, place(base, self.end_of(span, pair), F32, 2, 8))
        if cutlass.const_expr(p.spans > 1 or (p.production and p.span_warps > 1)):
            cute.arch.barrier()
        factors = self.factors(square, base, left, scale, span, lane, w)
        self.store_rows(rQ, rK, G, end, factors, base, span, pair)
        cute.arch.barrier()
        if w % p.span_warps == 0:
            self.make_x(base, beta, span, lane)
        if w % p.span_warps == p.span_warps - 1:
            self.make_m(base, span, lane)
        if cutlass.const_expr(p.spans > 1):
            cute.arch.barrier()
            if w == 0:
                self.merge(base, lane)
        if cutlass.const_expr(p.solve == "prepare"):
            cute.arch.barrier()
            self.make_w(base, w, lane)

    @cute.jit
    def load_pairs(self, m, t0, valid, span, head, pair):
        """Two neighbouring channels of a span's tokens, as they are: (2, SPAN) registers."""
        raw = cute.make_rmem_tensor((2, SPAN), m.element_type)
        stride = row_stride(m)
        first = I64(t0) * stride + (head * self.plan.K + 2 * pair)
        for i in cutlass.range_constexpr(SPAN):
            offset = cute.assume(first + cutlass.min(I32(span * SPAN + i), valid - 1) * stride, divby=2)
            source = cute.make_tensor(m.iterator + offset, cute.make_layout(2))
            cute.autovec_copy(source, raw[None, i])
        return raw

    @cute.jit
    def decays(self, rG, left, slopes, offsets, lower_bound):
        """Log decays in base 2 since the span's anchor, (2, SPAN), and what the whole span leaves."""
        G, sums = cute.make_rmem_tensor((2, SPAN), F32), zeros(2)
        for i in cutlass.range_constexpr(SPAN):
            live = F32(LOG2E) if i < left else F32(0.0)
            for c in cutlass.range_constexpr(2):
                g = rG[c, i].to(F32)
                if cutlass.const_expr(self.plan.production):
                    g = self.gate(g, slopes[c], offsets[c], lower_bound)
                sums[c] = sums[c] + g * live
                G[c, i] = sums[c]
        end = zeros(2)
        for c in cutlass.range_constexpr(2):
            end[c], _ = self.exponentials(sums[c])
        return G, end

    def end_of(self, span, pair):
        """First byte of what a span leaves of a thread's two channels."""
        return self.plan.unit_offsets["ends"] + (span * self.plan.K + 2 * pair) * 4

    @cute.jit
    def store_rows(self, rQ, rK, G, end, factors, base, span, pair):
        """A span's rows of KW, QG, KG and END, and what the matrices of the chunk are made of."""
        p = self.plan
        before, after = self.around(base, span, pair)
        kw, qg, kg, raised = zeros(2), zeros(2), zeros(2), zeros(2)
        q4, k4 = zeros(4), zeros(4)
        for i in cutlass.range_constexpr(SPAN):
            if cutlass.const_expr(i % 4 == 0):
                cute.autovec_copy(quarter(factors, i), q4)
                cute.autovec_copy(quarter(factors, SPAN + i), k4)
            for c in cutlass.range_constexpr(2):
                e, inverse = self.exponentials(G[c, i])
                k = rK[c, i].to(F32) * k4[i % 4]
                kw[c] = k * e
                qg[c] = rQ[c, i].to(F32) * q4[i % 4] * e
                raised[c] = k * inverse
                kg[c] = raised[c] * end[c]
            self.store_pair(base, p.unit_offsets["raised k"] + self.pair_byte(span, i, pair), raised)
            if cutlass.const_expr(p.spans > 1):
                self.store_near(kw, qg, kg, base, span, i, pair)
                for c in cutlass.range_constexpr(2):
                    kw[c], qg[c], kg[c] = kw[c] * before[c], qg[c] * before[c], kg[c] * after[c]
            for name, values in (("kw", kw), ("qg", qg), ("kg", kg)):
                self.store_pair(base, p.record_offsets[name] + self.pair_byte(span, i, pair), values)
        if span == 0:
            for c in cutlass.range_constexpr(2):
                end[c] = end[c] * after[c]
            cute.autovec_copy(end, place(base, p.record_offsets["end"] + 8 * pair, F32, 2, 8))

    def pair_byte(self, span, i, pair):
        """Byte of a thread's two channels of token i of a span, in an array of all the chunk's rows."""
        return span * (SPAN * 128) + self.plan.panel_byte(i, 2 * pair)

    @cute.jit
    def around(self, base, span, pair):
        """What the spans before this one leave of the thread's two channels, and what those after it do."""
        before, after = cute.make_rmem_tensor(2, F32), cute.make_rmem_tensor(2, F32)
        before.fill(1.0)
        after.fill(1.0)
        if cutlass.const_expr(self.plan.spans > 1):
            for other in cutlass.range_constexpr(self.plan.spans):
                end = cute.make_rmem_tensor(2, F32)
                cute.autovec_copy(place(base, self.end_of(other, pair), F32, 2, 8), end)
                for c in cutlass.range_constexpr(2):
                    before[c] = before[c] * (end[c] if other < span else F32(1.0))
                    after[c] = after[c] * (end[c] if other > span else F32(1.0))
        return before, after

    @cute.jit
    def store_near(self, kw, qg, kg, base, span, i, pair):
        """Rows from the span's own border, where the record has them from the chunk's."""
        p = self.plan
        byte = p.panel_byte(i, 2 * pair, p.near_rows)
        if span > 0:
            self.store_pair(base, p.unit_offsets["near kw"] + (span - 1) * (SPAN * 128) + byte, kw)
            self.store_pair(base, p.unit_offsets["near qg"] + (span - 1) * (SPAN * 128) + byte, qg)
        if span < p.spans - 1:
            self.store_pair(base, p.unit_offsets["near kg"] + span * (SPAN * 128) + byte, kg)

    def store_pair(self, base, offset, values):
        pair = cute.make_rmem_tensor(2, BF16)
        pair.store(values.load().to(BF16))
        cute.autovec_copy(pair, place(base, offset, BF16, 2, 4))

    @cute.jit
    def gate_parameters(self, mA, mBias, hv, pair):
        """Per channel slope and offset of the sigmoid's exponent in base 2; zeros in the plain contract."""
        slopes, offsets = zeros(2), zeros(2)
        if cutlass.const_expr(mA is not None):
            rate = cute.math.exp(mA[hv])
            for c in cutlass.range_constexpr(2):
                slopes[c] = rate * F32(-LOG2E)
                offsets[c] = slopes[c] * mBias[hv, 2 * pair + c]
        return slopes, offsets

    @cute.jit
    def squares(self, rQ, rK, base, lane, w):
        """Sums over this warp's channels of squares of 16 rows of q, then 16 of k: a row to a lane.

        To shared memory too, where a row is more than one warp's. Zero in the plain contract.
        """
        p = self.plan
        square = F32(0.0)
        if cutlass.const_expr(p.production):
            squares = [F32(0.0) for _ in range(2 * SPAN)]
            for i in cutlass.range_constexpr(SPAN):
                for c in cutlass.range_constexpr(2):
                    q, k = rQ[c, i].to(F32), rK[c, i].to(F32)
                    squares[i] = squares[i] + q * q
                    squares[SPAN + i] = squares[SPAN + i] + k * k
            square = self.lane_sums(squares, lane)
            if cutlass.const_expr(p.span_warps > 1):
                sums = place(base, p.unit_offsets["sums"], F32, p.unit_warps * WARP, 4)
                sums[w * WARP + lane] = square
        return square

    @cute.jit
    def factors(self, square, base, left, scale, span, lane, w):
        """What 16 rows of q, then 16 rows of k are multiplied by: L2 norm, scale; 0 where no token is.

        In shared memory, a copy for each warp.
        """
        p = self.plan
        factor = F32(1.0)
        if cutlass.const_expr(p.production):
            if cutlass.const_expr(p.span_warps > 1):
                sums = place(base, p.unit_offsets["sums"], F32, p.unit_warps * WARP, 4)
                square = F32(0.0)
                for other in cutlass.range_constexpr(p.span_warps):
                    square = square + sums[(span * p.span_warps + other) * WARP + lane]
            factor = self.norm_factor(square)
        if lane < SPAN:
            factor = factor * scale
        if lane % SPAN >= left:
            factor = F32(0.0)
        near = place(base, p.unit_offsets["factors"] + w * (WARP * 4), F32, WARP, WARP * 4)
        near[lane] = factor
        cute.arch.sync_warp()
        return near

    @cute.jit
    def lane_sums(self, values, lane):
        """Lane r gets the sum over the warp of values[r]: lanes halve what they carry at each of 5 steps."""
        for bit in (16, 8, 4, 2, 1):
            upper = lane // bit % 2 == 1
            kept = []
            for i in cutlass.range_constexpr(bit):
                keep, give = values[i], values[bit + i]
                if upper:
                    keep, give = values[bit + i], values[i]
                kept.append(keep + cute.arch.shuffle_sync_bfly(give, bit))
            values = kept
        return values[0]

    # EVOLVE-BEGIN norm_factor
    @cute.jit
    def norm_factor(self, square):
        """1 / |x| from the sum of squares of a token's K channels."""
        return cute.math.rsqrt(square + F32(NORM_EPSILON), fastmath=True)

    # EVOLVE-END norm_factor

    # EVOLVE-BEGIN gate
    @cute.jit
    def gate(self, g, slope, offset, lower_bound):
        """Log decay lower_bound · sigmoid(rate (g + bias)); slope g + offset = −log2(e) rate (g + bias)."""
        grown = cute.math.exp2(g * slope + offset, fastmath=True)
        return lower_bound * cute.arch.rcp_approx(F32(1.0) + grown)

    # EVOLVE-END gate

    # EVOLVE-BEGIN beta
    @cute.jit
    def beta(self, logit):
        """Strength of one token's correction, from what the tensor held."""
        value = logit
        if cutlass.const_expr(self.plan.production):
            value = cute.arch.rcp_approx(F32(1.0) + cute.math.exp2(logit * F32(-LOG2E), fastmath=True))
        return value

    # EVOLVE-END beta

    # EVOLVE-BEGIN exponentials
    @cute.jit
    def exponentials(self, G):
        """(2^G, 2^−G) for −116 <= G <= 0."""
        e = cute.math.exp2(G, fastmath=True)
        if cutlass.const_expr(self.plan.exp == "reciprocal"):
            return e, cute.arch.rcp_approx(e)
        return e, cute.math.exp2(-G, fastmath=True)

    # EVOLVE-END exponentials

    @cute.jit
    def gram(self, base, left, right, lane):
        """16 rows at `left` times 16 at `right` transposed, each (first byte, rows of its array): (4, 2)."""
        p = self.plan
        acc = zeros(4, 2)
        for kk in cutlass.range_constexpr(p.K // TILE):
            rows = p.panel_byte(p.left_row(lane), kk * TILE + p.left_column(lane), left[1])
            keys = p.panel_byte(p.right_row(lane), kk * TILE + p.right_column(lane), right[1])
            multiply(acc, fragment(base, left[0] + rows, False), fragment(base, right[0] + keys, False))
        return acc

    @cute.jit
    def later(self, name: cutlass.Constexpr, span):
        """Where a span's rows of KW or QG from its own border are: those of the first are the record's."""
        p = self.plan
        first, rows = I32(p.record_offsets[name]), I32(p.chunk)
        if span > 0:
            first = p.unit_offsets["near " + name] + (span - 1) * (SPAN * 128)
            rows = I32(p.near_rows)
        return first, rows

    def raised(self, span):
        """Where a span's rows of k e^−G are."""
        return self.plan.unit_offsets["raised k"] + span * (SPAN * 128), self.plan.chunk

    @cute.jit
    def make_x(self, base, beta, span, lane):
        """A span's block on the diagonal of X, by one warp; lane j or 16 + j has beta of its token j."""
        p = self.plan
        acc = self.gram(base, self.later("kw", span), self.raised(span), lane)
        first = p.unit_offsets["lower"] + span * (SPAN * SPAN * 4)
        lower = place(base, first, F32, SPAN * SPAN, 16)
        for e in cutlass.range_constexpr(4):
            row = p.product_row(lane, e)
            strength = cute.arch.shuffle_sync(beta, row)
            for j in cutlass.range_constexpr(2):
                column = p.product_column(lane, e, j)
                value = acc[e, j] * strength
                if column >= row:
                    value = F32(0.0)
                lower[column * SPAN + row] = value  # transposed: the inverse walks columns
        cute.arch.sync_warp()
        x = self.invert(base, first, lane)
        block = p.record_offsets["x"] + p.block_byte(span, span)
        if lane < SPAN:
            for i in cutlass.range_constexpr(SPAN):
                offset = block + p.square_byte(i, lane)
                place(base, offset, BF16, 1, 2)[0] = (x[i] * beta).to(BF16)

    # EVOLVE-BEGIN invert
    @cute.jit
    def invert(self, base, where, lane):
        """Column lane % 16 of (I + L)⁻¹ in fp32, L transposed in shared memory: forward substitution.

        "columns": a finished element is taken from all later rows at once. "halves": the two 8 × 8 blocks on
        the diagonal first, each lane the column of its own block, then −X22 L21 X11.
        """
        size = SPAN if self.plan.inverse == "columns" else SPAN // 2
        j = lane % SPAN
        x = [F32(0.0) for _ in range(SPAN)]
        for i in cutlass.range_constexpr(SPAN):
            x[i] = F32(1.0) if j == i else F32(0.0)
        for c in cutlass.range_constexpr(SPAN):
            column = self.lower_column(base, where, c)
            for i in cutlass.range_constexpr(c + 1, (c // size + 1) * size):
                x[i] = x[i] - column[i] * x[c]
        if cutlass.const_expr(size < SPAN):
            # Columns 0 … 7 have X11 above and zeros below; columns 8 … 15 the other way round.
            below = [F32(0.0) for _ in range(size)]
            for c in cutlass.range_constexpr(size):
                column = self.lower_column(base, where, c)
                for i in cutlass.range_constexpr(size):
                    below[i] = below[i] - column[size + i] * x[c]
            for c in cutlass.range_constexpr(size):
                column = self.lower_column(base, where, size + c)
                for i in cutlass.range_constexpr(c + 1, size):
                    below[i] = below[i] - column[size + i] * below[c]
            for i in cutlass.range_constexpr(size):
                x[size + i] = x[size + i] + below[i]
        return x

    # EVOLVE-END invert

    def lower_column(self, base, where, c):
        """Column c of L below its diagonal, zeros above, the same for all lanes."""
        column = cute.make_rmem_tensor(SPAN, F32)
        cute.autovec_copy(place(base, where + c * (SPAN * 4), F32, SPAN, 16), column)
        return column

    @cute.jit
    def make_m(self, base, span, lane):
        """A span's block on the diagonal of M, by one warp, and of the blocks below it M's and A."""
        p = self.plan
        acc = self.gram(base, self.later("qg", span), self.raised(span), lane)
        for j in cutlass.range_constexpr(2):
            for e in cutlass.range_constexpr(4):
                if p.product_column(lane, e, j) > p.product_row(lane, e):
                    acc[e, j] = F32(0.0)
        self.store_square(base, p.record_offsets["m"] + p.block_byte(span, span), acc, lane)
        if cutlass.const_expr(p.spans > 1):
            keys = (p.unit_offsets["near kg"], p.near_rows)
            if span > 0:
                acc = self.gram(base, (p.unit_offsets["near qg"], p.near_rows), keys, lane)
                self.store_square(base, p.record_offsets["m"] + p.block_byte(1, 0), acc, lane)
            else:
                acc = self.gram(base, (p.unit_offsets["near kw"], p.near_rows), keys, lane)
                for part in cutlass.range_constexpr(2):
                    self.store_square(base, p.unit_offsets["across"] + part * SQUARE_BYTES, acc, lane)
                    self.take_rounded(acc)

    def store_square(self, base, where, acc, lane):
        """Accumulators (4, 2) as a block of bf16."""
        p = self.plan
        for j in range(2):
            for half in range(2):
                pair = zeros(2)
                for c in range(2):
                    pair[c] = acc[2 * half + c, j]
                byte = p.square_byte(p.product_row(lane, 2 * half), p.product_column(lane, 0, j))
                self.store_pair(base, where + byte, pair)

    def take_rounded(self, acc):
        """acc ← acc − bf16(acc), what rounding has left: bf16 of both are 16 bits together."""
        for i in range(8):
            acc[i] = acc[i] - acc[i].to(BF16).to(F32)

    # EVOLVE-BEGIN merge
    @cute.jit
    def merge(self, base, lane):
        """Block (1, 0) of X, −X₁₁ A X₀₀, by one warp; A and X₁₁ A in two parts of bf16 each."""
        p = self.plan
        x = p.record_offsets["x"]
        upright = p.square_byte(p.left_row(lane), p.left_column(lane))
        first = fragment(base, x + p.block_byte(1, 1) + upright, False)
        second = fragment(base, x + p.block_byte(0, 0) + upright, True)
        product, merged = zeros(4, 2), zeros(4, 2)
        for part in cutlass.range_constexpr(2):
            across = p.unit_offsets["across"] + part * SQUARE_BYTES
            multiply(product, first, fragment(base, across + upright, True))
        for _ in cutlass.range_constexpr(2):
            multiply(merged, rounded(product)[None, 0], second)
            self.take_rounded(product)
        for i in cutlass.range_constexpr(8):
            merged[i] = -merged[i]
        self.store_square(base, x + p.block_byte(1, 0), merged, lane)

    # EVOLVE-END merge

    # EVOLVE-BEGIN make_w
    @cute.jit
    def make_w(self, base, w, lane):
        """W = −X KW in the place of KW, by all of a unit's warps, each with channels of its own."""
        p = self.plan
        x, first = p.record_offsets["x"], p.record_offsets["kw"]
        upright = p.square_byte(p.left_row(lane), p.left_column(lane))
        blocks = [
            [fragment(base, x + p.block_byte(i, j) + upright, False) for j in range(i + 1)]
            for i in range(p.spans)
        ]
        channels = p.K // p.unit_warps
        for jj in cutlass.range_constexpr(channels // TILE):
            channel = w * channels + jj * TILE
            byte = p.panel_byte(p.left_row(lane), channel + p.left_column(lane))
            keys = [fragment(base, first + s * (SPAN * 128) + byte, True) for s in range(p.spans)]
            cute.arch.sync_warp()  # lanes write where others have read: mma needs all, but orders no memory
            for i in cutlass.range_constexpr(p.spans):
                acc = zeros(4, 2)
                for j in cutlass.range_constexpr(i + 1):
                    multiply(acc, blocks[i][j], keys[j])
                self.store_negative(base, first + i * (SPAN * 128), channel, acc, lane)

    # EVOLVE-END make_w

    def store_negative(self, base, where, channel, acc, lane):
        """−accumulators (4, 2) as 16 channels of 16 rows of a record's part."""
        p = self.plan
        for j in range(2):
            for half in range(2):
                pair = zeros(2)
                for c in range(2):
                    pair[c] = -acc[2 * half + c, j]
                byte = p.panel_byte(p.product_row(lane, 2 * half), channel + p.product_column(lane, 0, j))
                self.store_pair(base, where + byte, pair)

    # EVOLVE-BEGIN store_record
    @cute.jit
    def store_record(self, mWork, base, index):
        """Shared memory to the workspace in one bulk copy, by one thread."""
        size = self.plan.record_bytes // 2
        cute.copy(
            cute.make_copy_atom(cpasync.CopyBulkS2GOp(), BF16),
            place(base, 0, BF16, size, ALIGNMENT_BYTES),
            place(mWork.iterator, index * self.plan.record_bytes, BF16, size, 128),
        )
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=False)

    # EVOLVE-END store_record

    @cute.jit
    def rank(self, mCu, mWork, N, T, HV, n, shared, tx):
        """Write sequence n where it comes when the longest go first; of equals the earlier one."""
        length = mCu[n + 1] - mCu[n]
        before = I32(0)
        for m in cutlass.range(tx, N, self.plan.prepare_threads, unroll=1):
            other = mCu[m + 1] - mCu[m]
            if other > length or (other == length and m < n):
                before = before + 1
        before = cute.arch.warp_reduction_sum(before, threads_in_group=WARP)
        counts = place(shared, 0, I32, self.plan.prepare_threads // WARP, 16)
        if tx % WARP == 0:
            counts[tx // WARP] = before
        cute.arch.barrier()
        ranks = self.ranks(mWork, N, T, HV)
        if tx == 0:
            total = I32(0)
            for w in cutlass.range_constexpr(self.plan.prepare_threads // WARP):
                total = total + counts[w]
            ranks[total] = n

    def ranks(self, mWork, N, T, HV):
        """The order of sequences in the workspace."""
        first = self.plan.workspace(I64(N), T, I64(HV))["order"]
        return place(mWork.iterator, first, I32, N, 128)

    # Recurrence

    @cute.kernel
    def recurrence(
        self,
        mV: cute.Tensor,
        mInitial: cute.Tensor,
        mCu: cute.Tensor,
        mO: cute.Tensor,
        mFinal: cute.Tensor,
        mWork: cute.Tensor,
        sizes,
    ):
        p = self.plan
        N, T, _, HV = sizes
        tx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        tile, hv, n = block % p.tiles, block // p.tiles % HV, block // p.tiles // HV
        if cutlass.const_expr(p.order == "longest"):
            self.await_prepare()
            n = self.ranks(mWork, N, T, HV)[n]
        begin, end = mCu[n], mCu[n + 1]
        chunks = (end - begin + (p.chunk - 1)) // p.chunk
        first = I64(p.first_slot(n, begin)) * HV + hv  # record of the first chunk; HV to the next

        base = (
            cutlass.memory.SmemAllocator()
            .allocate_tensor(U8, cute.make_layout(p.recurrence_shared_bytes), byte_alignment=ALIGNMENT_BYTES)
            .iterator
        )
        full = place(base, p.shared_offsets["barriers"], I64, p.stages, 8).iterator
        free = full + p.stages
        if cutlass.const_expr(p.copy == "bulk"):
            if tx == 0:
                for s in cutlass.range_constexpr(p.stages):
                    cute.arch.mbarrier_init(full + s, 1)
                    cute.arch.mbarrier_init(free + s, p.warps * WARP)
            cute.arch.mbarrier_init_fence()
            cute.arch.barrier()
        w, lane = cute.arch.make_warp_uniform(tx // WARP), tx % WARP
        records = (mWork, base, full, free, first, HV, chunks)
        if w < p.warps:
            strip, share = w // p.key_warps, w % p.key_warps
            column = tile * p.value_tile + strip * TILE  # first column of S, and of v and o, of this warp
            rows = (mV, mO, hv, HV, column, begin, end)
            states = (n, hv, column, share * p.keys)
            S = self.initial_state(mInitial, states, base, w, lane)
            self.await_prepare()
            self.walk(records, rows, S, (mWork, N, T), w, lane, tx)
            self.final_state(mFinal, states, S, lane)
        elif lane == 0:
            self.await_prepare()
            self.feed(records)

    def await_prepare(self):
        """Before anything is read that prepare wrote; without effect unless the grids overlap."""
        if self.plan.start == "early":
            cute.arch.griddepcontrol_wait()

    @cute.jit
    def feed(self, records):
        """All records of the sequence to the ring, by one thread that does nothing else."""
        p = self.plan
        _, _, _, free, _, _, chunks = records
        slot, phase = I32(0), I32(1)
        for chunk in cutlass.range(chunks, unroll=1):
            if chunk >= p.stages:
                cute.arch.mbarrier_wait(free + slot, phase)
            self.fetch(records, chunk, slot)
            slot = slot + 1
            if slot == p.stages:
                slot, phase = I32(0), phase ^ 1

    # EVOLVE-BEGIN fetch
    @cute.jit
    def fetch(self, records, chunk, slot):
        """One record to a slot of the ring, by one thread; `full` tells when it has come."""
        mWork, base, full, _, first, HV, _ = records
        p = self.plan
        cute.arch.mbarrier_arrive_and_expect_tx(full + slot, p.record_bytes)
        cute.copy(
            cute.make_copy_atom(cpasync.CopyBulkG2SOp(), BF16),
            place(mWork.iterator, (first + I64(chunk) * HV) * p.record_bytes, BF16, p.record_bytes // 2, 128),
            place(base, slot * p.stage_bytes, BF16, p.record_bytes // 2, ALIGNMENT_BYTES),
            mbar_ptr=full + slot,
        )

    # EVOLVE-END fetch

    # EVOLVE-BEGIN fetch_together
    @cute.jit
    def fetch_together(self, records, chunk, slot, tx):
        """One record to a slot of the ring, by all threads, 16 bytes each time."""
        mWork, base, _, _, first, HV, _ = records
        p = self.plan
        atom = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), BF16, num_bits_per_copy=128
        )
        source = (first + I64(chunk) * HV) * p.record_bytes
        threads = p.recurrence_threads
        for i in cutlass.range((p.record_bytes // 16 + threads - 1) // threads, unroll=4):
            piece = i * threads + tx
            if piece < p.record_bytes // 16:
                cute.copy(
                    atom,
                    place(mWork.iterator, source + piece * 16, BF16, PIECE, 16),
                    place(base, slot * p.stage_bytes + piece * 16, BF16, PIECE, 16),
                )

    # EVOLVE-END fetch_together

    @cute.jit
    def fetch_values(self, rows, base, chunk, slot, w, lane):
        """16 columns of v of this warp's own spans, 16 bytes a lane; past the end the last token again."""
        p = self.plan
        mV, _, hv, HV, column, begin, end = rows
        token, half = lane // 2, lane % 2 * PIECE
        atom = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), BF16, num_bits_per_copy=128
        )
        for s in cutlass.range_constexpr(p.own_spans):
            span = p.turned(s, w % p.key_warps)
            t = cutlass.min(begin + chunk * p.chunk + span * SPAN + token, end - 1)
            offset = cute.assume(I64(t) * row_stride(mV) + (hv * p.V + column + half), divby=PIECE)
            patch = self.values(slot, w) + span * SQUARE_BYTES
            cute.copy(
                atom,
                cute.make_tensor(mV.iterator + offset, cute.make_layout(PIECE)),
                place(base, patch + p.square_byte(token, half), BF16, PIECE, 16),
            )

    def values(self, slot, w):
        """First byte of the values of a strip: for each span a patch [16 tokens, 16 values]."""
        p = self.plan
        strip = slot * p.strips + w // p.key_warps
        return p.shared_offsets["values"] + strip * (p.spans * SQUARE_BYTES)

    @cute.jit
    def walk(self, records, rows, S, debug, w, lane, tx):
        """All chunks of the sequence, by one warp with its part of S.

        A slot is freed only behind the output of the chunk after: nothing but the arrival of its data keeps a
        read of shared memory before the copy that overwrites it, and that output needs all of the warp's S,
        hence whatever the warp has read of the slot. (Freed behind its own chunk's reads, which the hardware
        may still have had in its queue, a slot was overwritten too early in builds that store much.)

        Every lane frees it for its own reads: an arrival releases what the arriving thread has done. One for
        the warp, behind the warp barriers in `write`, is as good and as fast; racecheck does not see that.
        """
        p = self.plan
        _, base, full, free, _, _, chunks = records
        self.fetch_first(records, rows, w, lane, tx)
        slot, phase = I32(0), I32(0)
        for chunk in cutlass.range(chunks, unroll=1):
            cute.arch.cp_async_wait_group(p.stages - 2)
            if cutlass.const_expr(p.copy == "bulk"):
                cute.arch.sync_warp()
                cute.arch.mbarrier_wait(full + slot, phase)
            else:
                cute.arch.barrier()
            last = slot - 1  # of the chunk before
            if slot == 0:
                last = I32(p.stages - 1)
            where = cute.assume(slot * p.stage_bytes, ALIGNMENT_BYTES)
            if cutlass.const_expr(p.fetch == "before"):
                self.fetch_later(records, rows, chunk, slot, phase, last, w, lane, tx)
            U, O = self.enter(S, base, where, chunk, slot, w, lane)
            if cutlass.const_expr(p.fetch == "behind"):
                self.fetch_later(records, rows, chunk, slot, phase, last, w, lane, tx)
            if cutlass.const_expr(p.solve == "recurrence"):
                U = self.correct(U, base, self.values(slot, w), where + p.record_offsets["x"], lane)
            self.leave(S, U, O, base, where, w, lane)
            self.write(rows, base, chunk, O, w, lane)
            if cutlass.const_expr(p.copy == "bulk"):
                if chunk > 0:
                    cute.arch.mbarrier_arrive(free + last)
            if cutlass.const_expr(p.debug):
                self.write_debug(records, rows, debug, chunk, S, U, w, lane)
            slot = slot + 1
            if slot == p.stages:
                slot, phase = I32(0), phase ^ 1

    @cute.jit
    def fetch_first(self, records, rows, w, lane, tx):
        """What a warp fetches before the first chunk."""
        p = self.plan
        _, base, _, _, _, _, chunks = records
        for j in cutlass.range_constexpr(p.stages - 1):
            if j < chunks:
                if cutlass.const_expr(p.copy == "cp.async"):
                    self.fetch_together(records, j, j, tx)
                elif cutlass.const_expr(p.loader == "inline" and j < p.stages - 2):
                    if tx == 0:
                        self.fetch(records, j, j)
                self.fetch_values(rows, base, j, j, w, lane)
            cute.arch.cp_async_commit_group()  # also when empty: the number of groups stays static

    @cute.jit
    def fetch_later(self, records, rows, chunk, slot, phase, last, w, lane, tx):
        """What a warp fetches while it works on `chunk`, whose slot and phase are given.

        What threads copy goes `stages` − 1 chunks ahead, to the slot of the chunk before, which all who read
        it have left: they have met since. A bulk copy goes `stages` − 2 ahead, to the slot before that one,
        once `free` tells that all warps have left it.
        """
        p = self.plan
        _, base, _, free, _, _, chunks = records
        if cutlass.const_expr(p.copy == "bulk" and p.loader == "inline"):
            if tx == 0 and chunk + (p.stages - 2) < chunks:
                older, turn = slot - 2, phase
                if slot < 2:
                    older, turn = slot + (p.stages - 2), phase ^ 1
                if chunk >= 2:
                    cute.arch.mbarrier_wait(free + older, turn)
                self.fetch(records, chunk + (p.stages - 2), older)
        if chunk + (p.stages - 1) < chunks:
            if cutlass.const_expr(p.copy == "cp.async"):
                self.fetch_together(records, chunk + (p.stages - 1), last, tx)
            self.fetch_values(rows, base, chunk + (p.stages - 1), last, w, lane)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def enter(self, S, base, where, chunk, slot, w, lane):
        """What a chunk makes of the state it meets, which then decays: (KW S or U, QG S) transposed.

        Both [16 values, tokens] in accumulators (4, chunk / 8); of QG S the warp's own spans only.
        """
        p = self.plan
        at, share = p.record_offsets, w % p.key_warps
        first, turned = share * p.keys, [p.turned(s, share) for s in range(p.spans)]
        R, O = zeros(4, 2 * p.spans), zeros(4, 2 * p.spans)
        if cutlass.const_expr(p.solve == "prepare"):
            self.want(R, base, self.values(slot, w), where + at["x"], turned[: p.own_spans], lane)
        entering = self.entering(S)
        self.read_anew()
        self.contract(R, entering, base, where + at["kw"], first, (*range(p.spans),), lane)
        self.forget(S, base, where + at["end"], first, lane)
        self.contract(O, entering, base, where + at["qg"], first, turned, lane)
        if cutlass.const_expr(p.key_warps > 1):
            self.exchange(R, O, base, chunk, w, lane)
        return R, O

    @cute.jit
    def leave(self, S, U, O, base, where, w, lane):
        """S and the warp's own spans of O get what U brings."""
        p = self.plan
        at, share = p.record_offsets, w % p.key_warps
        left = rounded(U)
        self.read_anew()
        self.update(S, left, base, where + at["kg"], share * p.keys, lane)
        for s in cutlass.range_constexpr(p.own_spans):
            self.output(columns(O, s), left, base, where + at["m"], p.turned(s, share), lane)

    # EVOLVE-BEGIN want
    @cute.jit
    def want(self, U, base, values, where, spans, lane):
        """Uᵀ ← Uᵀ + Vᵀ Xᵀ for values of the spans that are listed, X by blocks on and below its diagonal."""
        p = self.plan
        square = p.square_byte(p.right_row(lane), p.right_column(lane))
        for s in cutlass.range_constexpr(len(spans)):
            j = spans[s]
            value = fragment(base, values + j * SQUARE_BYTES + square, True)
            for i in cutlass.range_constexpr(p.spans):
                if i >= j:
                    x = fragment(base, where + p.block_byte(i, j) + square, False)
                    multiply(columns(U, i), value, x)

    # EVOLVE-END want

    # EVOLVE-BEGIN contract
    @cute.jit
    def contract(self, acc, entering, base, where, first, spans, lane):
        """acc (4, chunk / 8) += Sᵀ times KW or QG transposed, over keys from `first` on, spans as listed."""
        p = self.plan
        sums = [acc, *(zeros(4, 2 * p.spans) for _ in range(p.partials - 1))]
        for kk in cutlass.range_constexpr(p.keys // TILE):
            for s in cutlass.range_constexpr(p.spans):
                byte = p.panel_byte(p.right_row(lane), first + kk * TILE + p.right_column(lane))
                keys = fragment(base, where + spans[s] * (SPAN * 128) + byte, False)
                multiply(columns(sums[kk % p.partials], s), entering[None, kk], keys)
        for other in sums[1:]:
            for i in cutlass.range_constexpr(8 * p.spans):
                acc[i] = acc[i] + other[i]

    # EVOLVE-END contract

    @cute.jit
    def exchange(self, R, O, base, chunk, w, lane):
        """R ← the sum of the strip's warps, the same bits in all; O ← that of the warp's own spans."""
        p = self.plan
        mine = self.partial(chunk, w, lane)
        for s in cutlass.range_constexpr(p.spans):
            self.move_partial(base, mine + p.partial_sum(s), columns(R, s), False)
        for s in cutlass.range_constexpr(p.own_spans, p.spans):
            self.move_partial(base, mine + p.partial_output(s), columns(O, s), False)
        cute.arch.barrier(barrier_id=1 + w // p.key_warps, number_of_threads=WARP * p.key_warps)
        for distance in cutlass.range_constexpr(1, p.key_warps):
            theirs = self.partial(chunk, w ^ distance, lane)
            for s in cutlass.range_constexpr(p.spans):
                self.add_partial(base, theirs + p.partial_sum(s), columns(R, s))
            for s in cutlass.range_constexpr(p.own_spans):
                self.add_partial(base, theirs + p.partial_output(p.told(s, distance)), columns(O, s))

    def partial(self, chunk, w, lane):
        """Where a warp's lane finds what the warp tells of a chunk."""
        p = self.plan
        return p.shared_offsets["partial"] + (chunk % 2 * p.warps + w) * p.partial_bytes + lane * 16

    def move_partial(self, base, where, block, load):
        """A lane's accumulators (4, 2), 16 bytes at a time; those of a warp's lanes lie side by side."""
        for j in range(2):
            near, far = block[None, j], place(base, where + j * (WARP * 16), F32, 4, 16)
            cute.autovec_copy(far, near) if load else cute.autovec_copy(near, far)

    def add_partial(self, base, where, block):
        other = cute.make_rmem_tensor((4, 2), F32)
        self.move_partial(base, where, other, True)
        for i in range(8):
            block[i] = block[i] + other[i]

    # EVOLVE-BEGIN forget
    @cute.jit
    def forget(self, S, base, where, first, lane):
        """Sᵀ ← Sᵀ Diag(END) for keys from `first` on: block j of 8 channels has the lane's two of them."""
        p = self.plan
        for j in cutlass.range_constexpr(p.keys // 8):
            end = cute.make_rmem_tensor(2, F32)
            byte = (first + p.product_column(lane, 0, j)) * 4
            cute.autovec_copy(place(base, where + byte, F32, 2, 8), end)
            block = self.block(S, j, 1)
            for e in cutlass.range_constexpr(4):
                block[e] = block[e] * end[e % 2]
            self.keep(S, j, block)

    # EVOLVE-END forget

    # EVOLVE-BEGIN correct
    @cute.jit
    def correct(self, R, base, values, where, lane):
        """Uᵀ = (V − R)ᵀ Xᵀ, X block by block on and below its diagonal; R is KW S."""
        p = self.plan
        square = p.square_byte(p.right_row(lane), p.right_column(lane))
        for s in cutlass.range_constexpr(p.spans):
            value = fragment(base, values + s * SQUARE_BYTES + square, True)
            for i in cutlass.range_constexpr(8):
                R[8 * s + i] = value[i].to(F32) - R[8 * s + i]
        wanted = rounded(R)
        U = zeros(4, 2 * p.spans)
        for j in cutlass.range_constexpr(p.spans):
            for i in cutlass.range_constexpr(j, p.spans):
                x = fragment(base, where + p.block_byte(i, j) + square, False)
                multiply(columns(U, i), wanted[None, j], x)
        return U

    # EVOLVE-END correct

    # EVOLVE-BEGIN update
    @cute.jit
    def update(self, S, left, base, where, first, lane):
        """Sᵀ ← Sᵀ + Uᵀ KG for keys from `first` on."""
        p = self.plan
        for jj in cutlass.range_constexpr(p.keys // TILE):
            two = self.block(S, 2 * jj, 2)
            for s in cutlass.range_constexpr(p.spans):
                byte = p.panel_byte(p.left_row(lane), first + jj * TILE + p.left_column(lane))
                keys = fragment(base, where + s * (SPAN * 128) + byte, True)
                multiply(two, left[None, s], keys)
            self.keep(S, 2 * jj, two)

    # EVOLVE-END update

    # EVOLVE-BEGIN output
    @cute.jit
    def output(self, O, left, base, where, span, lane):
        """Oᵀ ← Oᵀ + Uᵀ Mᵀ for one span of tokens, from those up to it."""
        p = self.plan
        square = p.square_byte(p.right_row(lane), p.right_column(lane))
        for j in cutlass.range_constexpr(p.spans):
            if j <= span:
                m = fragment(base, where + p.block_byte(span, j) + square, False)
                multiply(O, left[None, j], m)

    # EVOLVE-END output

    @cute.jit
    def write(self, rows, base, chunk, O, w, lane):
        """Turn Oᵀ through the warp's patch of shared memory; then 16 bytes of a token's row for each lane."""
        p = self.plan
        _, mO, hv, HV, column, begin, end = rows
        patch = p.shared_offsets["outputs"] + w * (p.own_spans * SQUARE_BYTES)
        cute.arch.sync_warp()
        for s in cutlass.range_constexpr(p.own_spans):
            byte = s * SQUARE_BYTES + p.square_byte(p.right_row(lane), p.right_column(lane))
            cute.copy(
                cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), BF16),
                rounded(columns(O, s))[None, 0],
                place(base, patch + byte, BF16, PIECE, 16),
            )
        cute.arch.sync_warp()
        token, half = lane // 2, lane % 2 * PIECE
        for s in cutlass.range_constexpr(p.own_spans):
            t = begin + chunk * p.chunk + p.turned(s, w % p.key_warps) * SPAN + token
            if t < end:
                row = cute.make_rmem_tensor(PIECE, BF16)
                byte = s * SQUARE_BYTES + p.square_byte(token, half)
                cute.autovec_copy(place(base, patch + byte, BF16, PIECE, 16), row)
                offset = cute.assume(I64(t) * row_stride(mO) + (hv * p.V + column + half), divby=PIECE)
                cute.autovec_copy(row, cute.make_tensor(mO.iterator + offset, cute.make_layout(PIECE)))

    @cute.jit
    def write_debug(self, records, rows, debug, chunk, S, U, w, lane):
        """U and the state after the chunk to the workspace."""
        p = self.plan
        mWork, N, T = debug
        _, _, _, _, first, HV, _ = records
        _, _, _, _, column, _, _ = rows
        where = p.workspace(I64(N), T, I64(HV))
        record = first + I64(chunk) * HV
        share = w % p.key_warps
        floats = cute.recast_ptr(mWork.iterator, dtype=F32)
        for e in cutlass.range_constexpr(4):
            value = column + p.product_row(lane, e)
            if share == 0:
                for j in cutlass.range_constexpr(2 * p.spans):
                    token = p.product_column(lane, e, j)
                    at = (record * p.chunk + token) * p.V + value
                    (floats + (where["u"] // 4 + at)).store(U[e, j])
            for j in cutlass.range_constexpr(p.keys // 8):
                at = (record * p.V + value) * p.K + share * p.keys + p.product_column(lane, e, j)
                (floats + (where["state"] // 4 + at)).store(S[e, j])

    # The state: accumulators (4, keys / 8) of a lane, or as many in shared memory, 16 bytes of one together

    def block(self, S, j, count: cutlass.Constexpr):
        """Registers (4, count) with blocks j … of 8 channels: S itself, or a copy for `keep` to put back."""
        if self.plan.state == "registers":
            return cute.make_tensor(S.iterator + 4 * j, cute.make_layout((4, count)))
        copied = cute.make_rmem_tensor((4, count), F32)
        for i in range(count):
            cute.autovec_copy(S[None, j + i], copied[None, i])
        return copied

    def keep(self, S, j, block):
        if self.plan.state == "shared":
            for i in range(cute.size(block, mode=[1])):
                cute.autovec_copy(block[None, i], S[None, j + i])

    def read_anew(self):
        """Keeps the compiler from holding a state in shared memory in registers from here on."""
        if self.plan.state == "shared":
            cute.arch.sync_warp()

    def entering(self, S):
        """S as left operands (8, keys / 16), bf16."""
        p = self.plan
        left = cute.make_rmem_tensor((PIECE, p.keys // TILE), BF16)
        for kk in range(p.keys // TILE):
            cute.autovec_copy(rounded(self.block(S, 2 * kk, 2))[None, 0], left[None, kk])
        return left

    @cute.jit
    def initial_state(self, mInitial, first, base, w, lane):
        """The warp's columns and keys from [N, HV, V, K], or zeros."""
        p = self.plan
        S = zeros(4, p.keys // 8)
        if cutlass.const_expr(p.state == "shared"):
            offset = p.shared_offsets["state"] + w * (TILE * p.keys * 4) + lane * 16
            layout = cute.make_layout((4, p.keys // 8), stride=(1, 4 * WARP))
            S = cute.make_tensor(place(base, offset, F32, 4, 16).iterator, layout)
            for j in cutlass.range_constexpr(p.keys // 8):
                self.keep(S, j, zeros(4, 1))
        if cute.size(mInitial, mode=[0]) > 0:
            self.move_state(mInitial, first, S, lane, True)
        return S

    @cute.jit
    def final_state(self, mFinal, first, S, lane):
        """The warp's columns and keys to [N, HV, V, K], unless the tensor is empty."""
        if cute.size(mFinal, mode=[0]) > 0:
            self.move_state(mFinal, first, S, lane, False)

    @cute.jit
    def move_state(self, m, first, S, lane, load: cutlass.Constexpr):
        """Between global memory, `first` (sequence, value head, column, key) on, and S, two keys a time."""
        p = self.plan
        n, hv, column, key = first
        first = I64(n) * m.stride[0] + (I64(hv) * p.V + column) * p.K + key
        for j in cutlass.range_constexpr(p.keys // 8):
            block = self.block(S, j, 1)
            for half in cutlass.range_constexpr(2):
                offset = p.product_row(lane, 2 * half) * p.K + p.product_column(lane, 0, j)
                far = cute.make_tensor(m.iterator + cute.assume(first + offset, divby=2), cute.make_layout(2))
                near = cute.make_tensor(block.iterator + 2 * half, cute.make_layout(2))
                if cutlass.const_expr(load):
                    cute.autovec_copy(far, near)
                else:
                    cute.autovec_copy(near, far)
            if cutlass.const_expr(load):
                self.keep(S, j, block)


def build(constants):
    """(callable, fake arguments) for `cute.compile`, in the operator's argument order."""
    plan = Plan.of(constants)
    reason = plan.why_not()
    if reason:
        raise ValueError(reason)
    kernel = KdaForward(plan)
    T, H, HV, N0, N1, NT, W = (cute.sym_int64() for _ in range(7))

    def fake(dtype, *shape, align=16):
        order = tuple(range(len(shape) - 1, -1, -1))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)

    per_head = (fake(F32, HV, align=4), fake(F32, HV, plan.K, align=4)) if plan.production else (None, None)
    arguments = (
        fake(BF16, T, H, plan.K),
        fake(BF16, T, H, plan.K),
        fake(BF16, T, HV, plan.V),
        fake(kernel.gate_io, T, HV, plan.K),
        fake(kernel.gate_io, T, HV, align=kernel.gate_io.width // 8),
        *per_head,
        fake(F32, N0, HV, plan.V, plan.K),
        fake(I32, N1, align=4),
        fake(BF16, T, HV, plan.V),
        fake(F32, NT, HV, plan.V, plan.K),
        fake(U8, W, align=128),
        *(I64(1) for _ in range(4)),
        F32(1.0),
        F32(-5.0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    return kernel, arguments
