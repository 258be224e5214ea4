"""Kimi Delta Attention on Hopper in chunks of 16 tokens, two kernels, in CuTe-DSL.

With G_i the inclusive cumulative log decay inside a chunk and S [K, V] the state in fp32 that enters it:

    KW = k e^G   QG = scale q e^G   KG = k e^{G_C − G}   END = e^{G_C}
    L = strictly lower part of Diag(beta) KW (k e^−G)ᵀ     M = lower part of QG (k e^−G)ᵀ
    X = (I + L)⁻¹ Diag(beta)

    U = X (V − KW S);   O = QG S + M U;   S ← Diag(END) S + KGᵀ U

(Kimi Linear, section 3; X and M stay apart from S, so only three products wait for the state.)

    prepare     token-parallel, a unit of K/2 threads per chunk and value head: all but the last line, to the
                workspace as one record per chunk and head (`Plan`)
    recurrence  a block per `value_tile` columns of S, value head and sequence: the last line, records
                through a ring of `stages` slots in shared memory. A warp has 16 columns of S in the
                accumulators of its matrix products, as rows of Sᵀ, and needs no other warp

Operands (host tensors): q, k [T, H, K], v, o [T, HV, V] in bf16; g [T, HV, K] and beta [T, HV] fp32 (plain)
or bf16 (production: raw gate, logits); A_log [HV], dt_bias [HV, K] fp32 or None (plain); initial and final
state [N, HV, V, K] fp32, where an empty first extent means "zeros" and "not wanted"; cu_seqlens [N + 1] int32
from 0 on; workspace uint8, `Plan.workspace` bytes. Value head hv reads the q and k of head hv // (HV / H).
Only the first axis may have gaps, in whole heads (beta's in any number); other strides are refused at the
call.

Constraints: `Plan.why_not`, and log decays of at least −5 a token: a chunk's share one anchor, its start.
Operands of matrix products are rounded to bf16; decays, inverse and state are fp32. Offsets are 64-bit.
"""

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from evotune.search_space.templates.kda_sm90_chunked_plan import ALIGNMENT_BYTES, CHUNK, TILE, WARP, Plan

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
                rows = (t0, valid, head // (HV // H), head, H, HV)
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
        t0 = begin + (slot - self.plan.first_slot(low, begin)) * CHUNK
        return t0, cutlass.min(I32(CHUNK), end - t0)

    @cute.jit
    def make_record(self, tensors, base, rows, scale, lower_bound, tp):
        """The record of one chunk and head at `base`, by K/2 threads; thread tp has channels 2 tp, 2 tp + 1.

        Rows from `valid` on repeat the last one's data; their norm factors and beta are 0 and they do not
        decay, so that they leave o and S alone.
        """
        p = self.plan
        mQ, mK, mG, mBeta, mA, mBias = tensors
        t0, valid, h, hv, H, HV = rows
        lane, w = tp % WARP, cute.arch.make_warp_uniform(tp // WARP)
        rQ = self.load_pairs(mQ, t0, valid, h, H, tp)
        rK = self.load_pairs(mK, t0, valid, h, H, tp)
        rG = self.load_pairs(mG, t0, valid, hv, HV, tp)
        beta = F32(0.0)
        if lane % CHUNK < valid:
            offset = I64(t0 + lane % CHUNK) * row_stride(mBeta) + hv
            beta = self.beta((mBeta.iterator + offset).load().to(F32))
        slopes, offsets = self.gate_parameters(mA, mBias, hv, tp)
        factors = self.factors(rQ, rK, base, valid, scale, lane, w)

        raised = cute.make_rmem_tensor((2, CHUNK), F32)
        G, e = zeros(2), zeros(2)
        for i in cutlass.range_constexpr(CHUNK):
            live = F32(1.0) if i < valid else F32(0.0)
            kw, qg = zeros(2), zeros(2)
            for c in cutlass.range_constexpr(2):
                g = rG[c, i].to(F32)
                if cutlass.const_expr(p.production):
                    g = self.gate(g, slopes[c], offsets[c], lower_bound)
                G[c] = G[c] + g * (live * F32(LOG2E))
                e[c], inverse = self.exponentials(G[c])
                k = rK[c, i].to(F32) * factors[CHUNK + i]
                kw[c] = k * e[c]
                qg[c] = rQ[c, i].to(F32) * factors[i] * e[c]
                raised[c, i] = k * inverse
            self.store_pair(base, p.record_offsets["kw"] + p.panel_byte(i, 2 * tp), kw)
            self.store_pair(base, p.record_offsets["qg"] + p.panel_byte(i, 2 * tp), qg)
            self.store_pair(base, p.unit_offsets["raised k"] + p.panel_byte(i, 2 * tp), raised[None, i])
        for i in cutlass.range_constexpr(CHUNK):
            kg = zeros(2)
            for c in cutlass.range_constexpr(2):
                kg[c] = raised[c, i] * e[c]
            self.store_pair(base, p.record_offsets["kg"] + p.panel_byte(i, 2 * tp), kg)
        cute.autovec_copy(e, place(base, p.record_offsets["end"] + 8 * tp, F32, 2, 8))
        cute.arch.barrier()
        if w == 0:
            self.make_x(base, beta, lane)
        if w == p.unit_warps - 1:
            self.make_m(base, lane)

    @cute.jit
    def load_pairs(self, m, t0, valid, head, heads, tp):
        """Two neighbouring channels of 16 tokens, as they are: (2, CHUNK) registers."""
        raw = cute.make_rmem_tensor((2, CHUNK), m.element_type)
        stride = row_stride(m)
        first = I64(t0) * stride + (head * self.plan.K + 2 * tp)
        for i in cutlass.range_constexpr(CHUNK):
            offset = cute.assume(first + cutlass.min(I32(i), valid - 1) * stride, divby=2)
            source = cute.make_tensor(m.iterator + offset, cute.make_layout(2))
            cute.autovec_copy(source, raw[None, i])
        return raw

    def store_pair(self, base, offset, values):
        pair = cute.make_rmem_tensor(2, BF16)
        pair.store(values.load().to(BF16))
        cute.autovec_copy(pair, place(base, offset, BF16, 2, 4))

    @cute.jit
    def gate_parameters(self, mA, mBias, hv, tp):
        """Per channel slope and offset of the sigmoid's exponent in base 2; zeros in the plain contract."""
        slopes, offsets = zeros(2), zeros(2)
        if cutlass.const_expr(mA is not None):
            rate = cute.math.exp(mA[hv])
            for c in cutlass.range_constexpr(2):
                slopes[c] = rate * F32(-LOG2E)
                offsets[c] = slopes[c] * mBias[hv, 2 * tp + c]
        return slopes, offsets

    @cute.jit
    def factors(self, rQ, rK, base, valid, scale, lane, w):
        """What 16 rows of q, then 16 rows of k are multiplied by: L2 norm, scale; 0 where no token is."""
        p = self.plan
        factor = F32(1.0)
        if cutlass.const_expr(p.production):
            squares = [F32(0.0) for _ in range(2 * CHUNK)]
            for i in cutlass.range_constexpr(CHUNK):
                for c in cutlass.range_constexpr(2):
                    q, k = rQ[c, i].to(F32), rK[c, i].to(F32)
                    squares[i] = squares[i] + q * q
                    squares[CHUNK + i] = squares[CHUNK + i] + k * k
            square = self.lane_sums(squares, lane)
            if cutlass.const_expr(p.unit_warps > 1):
                sums = place(base, p.unit_offsets["sums"], F32, p.unit_warps * WARP, 4)
                sums[w * WARP + lane] = square
                cute.arch.barrier()
                square = F32(0.0)
                for other in cutlass.range_constexpr(p.unit_warps):
                    square = square + sums[other * WARP + lane]
            factor = self.norm_factor(square)
        if lane < CHUNK:
            factor = factor * scale
        if lane % CHUNK >= valid:
            factor = F32(0.0)
        near = place(base, p.unit_offsets["factors"] + w * (WARP * 4), F32, WARP, WARP * 4)
        near[lane] = factor
        cute.arch.sync_warp()
        every = cute.make_rmem_tensor(WARP, F32)
        cute.autovec_copy(near, every)
        return every

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
    def gram(self, base, part: cutlass.Constexpr, lane):
        """KW or QG times the raised keys, transposed: [16, 16] in one warp's accumulators (4, 2)."""
        p = self.plan
        acc = zeros(4, 2)
        for kk in cutlass.range_constexpr(p.K // TILE):
            left = p.panel_byte(p.left_row(lane), kk * TILE + p.left_column(lane))
            right = p.panel_byte(p.right_row(lane), kk * TILE + p.right_column(lane))
            multiply(
                acc,
                fragment(base, p.record_offsets[part] + left, False),
                fragment(base, p.unit_offsets["raised k"] + right, False),
            )
        return acc

    @cute.jit
    def make_x(self, base, beta, lane):
        """X of the record, by one warp; lane j or 16 + j has beta of token j."""
        p = self.plan
        acc = self.gram(base, "kw", lane)
        lower = place(base, p.unit_offsets["lower"], F32, CHUNK * CHUNK, 16)
        for e in cutlass.range_constexpr(4):
            row = p.product_row(lane, e)
            strength = cute.arch.shuffle_sync(beta, row)
            for j in cutlass.range_constexpr(2):
                column = p.product_column(lane, e, j)
                value = acc[e, j] * strength
                if column >= row:
                    value = F32(0.0)
                lower[column * CHUNK + row] = value  # transposed: the inverse walks columns
        cute.arch.sync_warp()
        x = self.invert(base, lane)
        if lane < CHUNK:
            for i in cutlass.range_constexpr(CHUNK):
                offset = p.record_offsets["x"] + p.square_byte(i, lane)
                place(base, offset, BF16, 1, 2)[0] = (x[i] * beta).to(BF16)

    # EVOLVE-BEGIN invert
    @cute.jit
    def invert(self, base, lane):
        """Column lane % 16 of (I + L)⁻¹ in fp32, L transposed in shared memory: forward substitution.

        "columns": a finished element is taken from all later rows at once. "halves": the two 8 × 8 blocks on
        the diagonal first, each lane the column of its own block, then −X22 L21 X11.
        """
        size = CHUNK if self.plan.inverse == "columns" else CHUNK // 2
        j = lane % CHUNK
        x = [F32(0.0) for _ in range(CHUNK)]
        for i in cutlass.range_constexpr(CHUNK):
            x[i] = F32(1.0) if j == i else F32(0.0)
        for c in cutlass.range_constexpr(CHUNK):
            column = self.lower_column(base, c)
            for i in cutlass.range_constexpr(c + 1, (c // size + 1) * size):
                x[i] = x[i] - column[i] * x[c]
        if cutlass.const_expr(size < CHUNK):
            # Columns 0 … 7 have X11 above and zeros below; columns 8 … 15 the other way round.
            below = [F32(0.0) for _ in range(size)]
            for c in cutlass.range_constexpr(size):
                column = self.lower_column(base, c)
                for i in cutlass.range_constexpr(size):
                    below[i] = below[i] - column[size + i] * x[c]
            for c in cutlass.range_constexpr(size):
                column = self.lower_column(base, size + c)
                for i in cutlass.range_constexpr(c + 1, size):
                    below[i] = below[i] - column[size + i] * below[c]
            for i in cutlass.range_constexpr(size):
                x[size + i] = x[size + i] + below[i]
        return x

    # EVOLVE-END invert

    def lower_column(self, base, c):
        """Column c of L below its diagonal, zeros above, the same for all lanes."""
        column = cute.make_rmem_tensor(CHUNK, F32)
        offset = self.plan.unit_offsets["lower"] + c * (CHUNK * 4)
        cute.autovec_copy(place(base, offset, F32, CHUNK, 16), column)
        return column

    @cute.jit
    def make_m(self, base, lane):
        """M of the record, by one warp."""
        p = self.plan
        acc = self.gram(base, "qg", lane)
        for j in cutlass.range_constexpr(2):
            for half in cutlass.range_constexpr(2):
                row = p.product_row(lane, 2 * half)
                pair = zeros(2)
                for c in cutlass.range_constexpr(2):
                    pair[c] = acc[2 * half + c, j]
                    if p.product_column(lane, c, j) > row:
                        pair[c] = F32(0.0)
                offset = p.record_offsets["m"] + p.square_byte(row, p.product_column(lane, 0, j))
                self.store_pair(base, offset, pair)

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
        chunks = (end - begin + (CHUNK - 1)) // CHUNK
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
                    cute.arch.mbarrier_init(free + s, p.warps)
            cute.arch.mbarrier_init_fence()
            cute.arch.barrier()
        w, lane = cute.arch.make_warp_uniform(tx // WARP), tx % WARP
        records = (mWork, base, full, free, first, HV, chunks)
        if w < p.warps:
            column = tile * p.value_tile + w * TILE  # first column of S, and of v and o, of this warp
            rows = (mV, mO, hv, HV, column, begin, end)
            states = (n, hv, column)
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
        """This warp's 16 columns of 16 tokens of v, 16 bytes a lane; past the end the last token again."""
        p = self.plan
        mV, _, hv, HV, column, begin, end = rows
        token, half = lane // 2, lane % 2 * PIECE
        t = cutlass.min(begin + chunk * CHUNK + token, end - 1)
        offset = cute.assume(I64(t) * row_stride(mV) + (hv * p.V + column + half), divby=PIECE)
        atom = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), BF16, num_bits_per_copy=128
        )
        cute.copy(
            atom,
            cute.make_tensor(mV.iterator + offset, cute.make_layout(PIECE)),
            place(base, self.patch("values", slot, w) + p.square_byte(token, half), BF16, PIECE, 16),
        )

    def patch(self, name, slot, w):
        """First byte of a warp's [16 tokens, 16 values] in shared memory."""
        return self.plan.shared_offsets[name] + (slot * self.plan.warps + w) * (CHUNK * TILE * 2)

    @cute.jit
    def walk(self, records, rows, S, debug, w, lane, tx):
        """All chunks of the sequence, by one warp with its 16 columns of S.

        A slot is freed only behind the output of the chunk after: nothing but the arrival of its data keeps a
        read of shared memory before the copy that overwrites it, and that output needs all of S, hence
        whatever the warp has read of the slot. (Freed behind its own chunk's reads, which the hardware may
        still have had in its queue, a slot was overwritten too early in builds that store much.)
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
            self.fetch_later(records, rows, chunk, slot, phase, last, w, lane, tx)
            O, U = self.step(S, base, cute.assume(slot * p.stage_bytes, ALIGNMENT_BYTES), slot, w, lane)
            self.write(rows, base, chunk, O, w, lane)
            if cutlass.const_expr(p.copy == "bulk"):
                if chunk > 0 and lane == 0:
                    cute.arch.mbarrier_arrive(free + last)
            if cutlass.const_expr(p.debug):
                self.write_debug(records, rows, debug, chunk, S, U, lane)
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

        What threads copy goes `stages` − 1 chunks ahead, to the slot of the chunk before, which all of them
        have left. A bulk copy goes `stages` − 2 ahead, to the slot before that one, once `free` tells that
        all warps have left it.
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
    def step(self, S, base, where, slot, w, lane):
        """One chunk: S moves on. The warp's (O, U), both [16 values, 16 tokens] in accumulators (4, 2)."""
        p = self.plan
        at = p.record_offsets
        entering = self.entering(S)
        self.read_anew()
        R = self.contract(entering, base, where + at["kw"], lane)
        self.forget(S, base, where + at["end"], lane)
        O = self.contract(entering, base, where + at["qg"], lane)
        patch = self.patch("values", slot, w)
        values = fragment(base, patch + p.square_byte(p.right_row(lane), p.right_column(lane)), True)
        U = self.correct(values, R, base, where + at["x"], lane)
        left = rounded(U)
        self.read_anew()
        self.update(S, left, base, where + at["kg"], lane)
        self.output(O, left, base, where + at["m"], lane)
        return O, U

    # EVOLVE-BEGIN contract
    @cute.jit
    def contract(self, entering, base, where, lane):
        """Sᵀ times KW or QG transposed: [16 values, 16 tokens] in accumulators (4, 2)."""
        p = self.plan
        sums = [zeros(4, 2) for _ in range(p.partials)]
        for kk in cutlass.range_constexpr(p.K // TILE):
            byte = p.panel_byte(p.right_row(lane), kk * TILE + p.right_column(lane))
            multiply(sums[kk % p.partials], entering[None, kk], fragment(base, where + byte, False))
        for other in sums[1:]:
            for i in cutlass.range_constexpr(8):
                sums[0][i] = sums[0][i] + other[i]
        return sums[0]

    # EVOLVE-END contract

    # EVOLVE-BEGIN forget
    @cute.jit
    def forget(self, S, base, where, lane):
        """Sᵀ ← Sᵀ Diag(END): block j of 8 channels has the lane's two of them."""
        p = self.plan
        for j in cutlass.range_constexpr(p.K // 8):
            end = cute.make_rmem_tensor(2, F32)
            cute.autovec_copy(place(base, where + p.product_column(lane, 0, j) * 4, F32, 2, 8), end)
            block = self.block(S, j, 1)
            for e in cutlass.range_constexpr(4):
                block[e] = block[e] * end[e % 2]
            self.keep(S, j, block)

    # EVOLVE-END forget

    # EVOLVE-BEGIN correct
    @cute.jit
    def correct(self, values, R, base, where, lane):
        """Uᵀ = (V − R)ᵀ Xᵀ."""
        p = self.plan
        for i in cutlass.range_constexpr(8):
            R[i] = values[i].to(F32) - R[i]
        U = zeros(4, 2)
        x = fragment(base, where + p.square_byte(p.right_row(lane), p.right_column(lane)), False)
        multiply(U, rounded(R)[None, 0], x)
        return U

    # EVOLVE-END correct

    # EVOLVE-BEGIN update
    @cute.jit
    def update(self, S, left, base, where, lane):
        """Sᵀ ← Sᵀ + Uᵀ KG."""
        p = self.plan
        for jj in cutlass.range_constexpr(p.K // TILE):
            byte = p.panel_byte(p.left_row(lane), jj * TILE + p.left_column(lane))
            two = self.block(S, 2 * jj, 2)
            multiply(two, left[None, 0], fragment(base, where + byte, True))
            self.keep(S, 2 * jj, two)

    # EVOLVE-END update

    # EVOLVE-BEGIN output
    @cute.jit
    def output(self, O, left, base, where, lane):
        """Oᵀ ← Oᵀ + Uᵀ Mᵀ."""
        p = self.plan
        m = fragment(base, where + p.square_byte(p.right_row(lane), p.right_column(lane)), False)
        multiply(O, left[None, 0], m)

    # EVOLVE-END output

    @cute.jit
    def write(self, rows, base, chunk, O, w, lane):
        """Turn Oᵀ through the warp's patch of shared memory; then 16 bytes of a token's row for each lane."""
        p = self.plan
        _, mO, hv, HV, column, begin, end = rows
        patch = self.patch("outputs", 0, w)
        cute.arch.sync_warp()
        cute.copy(
            cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), BF16),
            rounded(O)[None, 0],
            place(base, patch + p.square_byte(p.right_row(lane), p.right_column(lane)), BF16, PIECE, 16),
        )
        cute.arch.sync_warp()
        token, half = lane // 2, lane % 2 * PIECE
        t = begin + chunk * CHUNK + token
        if t < end:
            row = cute.make_rmem_tensor(PIECE, BF16)
            cute.autovec_copy(place(base, patch + p.square_byte(token, half), BF16, PIECE, 16), row)
            offset = cute.assume(I64(t) * row_stride(mO) + (hv * p.V + column + half), divby=PIECE)
            cute.autovec_copy(row, cute.make_tensor(mO.iterator + offset, cute.make_layout(PIECE)))

    @cute.jit
    def write_debug(self, records, rows, debug, chunk, S, U, lane):
        """U and the state after the chunk to the workspace."""
        p = self.plan
        mWork, N, T = debug
        _, _, _, _, first, HV, _ = records
        _, _, _, _, column, _, _ = rows
        where = p.workspace(I64(N), T, I64(HV))
        record = first + I64(chunk) * HV
        floats = cute.recast_ptr(mWork.iterator, dtype=F32)
        for e in cutlass.range_constexpr(4):
            value = column + p.product_row(lane, e)
            for j in cutlass.range_constexpr(2):
                token = p.product_column(lane, e, j)
                at = (record * CHUNK + token) * p.V + value
                (floats + (where["u"] // 4 + at)).store(U[e, j])
            for j in cutlass.range_constexpr(p.K // 8):
                at = (record * p.V + value) * p.K + p.product_column(lane, e, j)
                (floats + (where["state"] // 4 + at)).store(S[e, j])

    # The state: accumulators (4, K / 8) of a lane, or as many in shared memory, 16 bytes of a lane together

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
        """S as left operands (8, K / 16), bf16."""
        p = self.plan
        left = cute.make_rmem_tensor((PIECE, p.K // TILE), BF16)
        for kk in range(p.K // TILE):
            cute.autovec_copy(rounded(self.block(S, 2 * kk, 2))[None, 0], left[None, kk])
        return left

    @cute.jit
    def initial_state(self, mInitial, first, base, w, lane):
        """The warp's columns from [N, HV, V, K], or zeros."""
        p = self.plan
        S = zeros(4, p.K // 8)
        if cutlass.const_expr(p.state == "shared"):
            offset = p.shared_offsets["state"] + w * (TILE * p.K * 4) + lane * 16
            layout = cute.make_layout((4, p.K // 8), stride=(1, 4 * WARP))
            S = cute.make_tensor(place(base, offset, F32, 4, 16).iterator, layout)
            for j in cutlass.range_constexpr(p.K // 8):
                self.keep(S, j, zeros(4, 1))
        if cute.size(mInitial, mode=[0]) > 0:
            self.move_state(mInitial, first, S, lane, True)
        return S

    @cute.jit
    def final_state(self, mFinal, first, S, lane):
        """The warp's columns to [N, HV, V, K], unless the tensor is empty."""
        if cute.size(mFinal, mode=[0]) > 0:
            self.move_state(mFinal, first, S, lane, False)

    @cute.jit
    def move_state(self, m, first, S, lane, load: cutlass.Constexpr):
        """Between global memory, `first` (sequence, value head, column) on, and S, two channels at a time."""
        p = self.plan
        n, hv, column = first
        first = I64(n) * m.stride[0] + (I64(hv) * p.V + column) * p.K
        for j in cutlass.range_constexpr(p.K // 8):
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
