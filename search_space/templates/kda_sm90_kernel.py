"""Kimi Delta Attention on Hopper, one token after the other, in CuTe-DSL.

For every sequence n and value head hv, with the state S [K, V] in fp32:

    S ← diag(decay_t) S;   u = beta_t (v_t − Sᵀ k_t);   S ← S + k_t uᵀ;   o_t = Sᵀ (scale · q_t)

A block owns `value_tile` columns of S; columns never meet, so blocks need no communication. Tokens arrive in
chunks of `tokens` through a ring of `stages` slots in shared memory:

    copy     cp.async, 16 bytes a thread: q, k, g, v of one chunk into one slot
    prepare  a warp per token: L2 norm, gate, exponential, to fp32 rows that the whole block reads
    step     per token: forget, correction, update, output; a column's K elements lie over `key_split` lanes.
             `unroll` tokens a turn: nothing waits for a token's output, so it overlaps the next one's start

Operands (host tensors): q, k [T, H, K], v, o [T, HV, V] in the io type; g [T, HV, K] and beta [T, HV] fp32
(plain) or io type (production: raw gate, logits); A_log [HV], dt_bias [HV, K] fp32 or None (plain); initial
and final state [N, HV, V, K] fp32, where an empty first extent means "zeros" and "not wanted"; cu_seqlens
[N + 1] int32; workspace uint8, empty unless debugging. Value head hv reads the q and k of head
hv // (HV / H). Only the first axis may have gaps, in whole heads (beta's in any number); other strides are
refused at the call.

Constraints: `Plan.why_not`. Offsets are 64-bit: static inner extents would make the DSL compute them in 32.
"""

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from evotune.search_space.templates.kda_sm90_plan import ALIGNMENT_BYTES, WARP, Plan

BF16, F32, I32, I64 = cutlass.BFloat16, cutlass.Float32, cutlass.Int32, cutlass.Int64
LOG2E = 1.4426950408889634
NORM_EPSILON = 1e-6


def row_stride(m):
    """Elements from a token to the next one: rows may lie apart, as in a slice of a fused projection."""
    return I32(m.stride[0])


class KdaForward:
    """The kernel of one `Plan`; `build` makes it."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.io = BF16 if plan.io_bytes == 2 else F32
        self.gate_io = self.io if plan.production else F32

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
        if N * HV > 0:
            heads = (T, I32(H), I32(HV))
            self.kernel(
                mQ, mK, mV, mG, mBeta, mA, mBias, mInitial, mCu, mO, mFinal, mWork, heads, scale, lower_bound
            ).launch(
                grid=[I32(N) * self.plan.tiles, I32(HV), 1],
                block=[self.plan.threads, 1, 1],
                stream=stream,
            )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mG: cute.Tensor,
        mBeta: cute.Tensor,
        mA,
        mBias,
        mInitial: cute.Tensor,
        mCu: cute.Tensor,
        mO: cute.Tensor,
        mFinal: cute.Tensor,
        mWork: cute.Tensor,
        heads,
        scale: cutlass.Float32,
        lower_bound: cutlass.Float32,
    ):
        p = self.plan
        T, H, HV = heads
        tx, _, _ = cute.arch.thread_idx()
        block, hv, _ = cute.arch.block_idx()
        n, v0 = block // p.tiles, block % p.tiles * p.value_tile
        h = hv // (HV // H)

        smem = cutlass.memory.SmemAllocator()
        ring = [
            self.shared(smem, dtype, (p.stages, p.tokens, width))
            for dtype, width in ((self.io, p.K), (self.io, p.K), (self.gate_io, p.K), (self.io, p.value_tile))
        ]
        ready = [self.shared(smem, F32, (p.tokens, p.K)) for _ in range(3)]  # q, k, decay
        sBeta = self.shared(smem, F32, (p.tokens,))
        sS = None
        if cutlass.const_expr(p.state == "shared"):
            sS = self.shared(smem, F32, (p.columns, p.slice // p.vector, p.threads, p.vector))
        # (tensor, head, width of a row, first element)
        sources = ((mQ, h, p.K, 0), (mK, h, p.K, 0), (mG, hv, p.K, 0), (mV, hv, p.V, v0))

        rate, rBias = self.gate_parameters(mA, mBias, hv, tx)
        begin, end = mCu[n], mCu[n + 1]
        chunks = (end - begin + (p.tokens - 1)) // p.tokens
        first = (n, (I64(hv) * p.V + v0) * p.K)  # of this block's columns in the states
        rS = self.initial_state(mInitial, first, sS, tx)

        for j in cutlass.range_constexpr(p.stages - 1):
            if j < chunks:
                self.copy_chunk(sources, ring, j, begin + j * p.tokens, end, tx)
            cute.arch.cp_async_commit_group()  # also when empty: the number of groups stays static
        logit = self.fetch_beta(mBeta, begin, end, hv, tx)
        slot = I32(0)
        for chunk in cutlass.range(chunks, unroll=1):
            t0 = begin + chunk * p.tokens
            if cutlass.const_expr(p.stages == 1):
                cute.arch.barrier()
                self.copy_chunk(sources, ring, 0, t0, end, tx)
                cute.arch.cp_async_commit_group()
                cute.arch.cp_async_wait_group(0)
                cute.arch.barrier()
            else:
                cute.arch.cp_async_wait_group(p.stages - 2)
                cute.arch.barrier()
                ahead = (slot + (p.stages - 1)) % p.stages
                if chunk + (p.stages - 1) < chunks:
                    self.copy_chunk(sources, ring, ahead, t0 + (p.stages - 1) * p.tokens, end, tx)
                cute.arch.cp_async_commit_group()
            valid = cutlass.min(I32(p.tokens), end - t0)
            self.prepare(ring, slot, ready, rate, rBias, scale, lower_bound, valid, tx)
            if tx < p.tokens:
                sBeta[tx] = self.beta(logit)
            logit = self.fetch_beta(mBeta, t0 + p.tokens, end, hv, tx)
            cute.arch.barrier()
            if cutlass.const_expr(p.debug):
                self.write_prepared(mWork, ready, sBeta, t0, valid, T, HV, hv, v0, tx)
            for j in cutlass.range((valid + (p.unroll - 1)) // p.unroll, unroll=1):
                for r in cutlass.range_constexpr(p.unroll):
                    i = j * p.unroll + r
                    out = (mO, mWork, T, HV, hv, v0, t0 + i, end)
                    self.step(rS, sS, ready, sBeta, ring[3][slot, None, None], i, out, tx)
            slot = (slot + 1) % p.stages
        cute.arch.cp_async_wait_group(0)
        self.final_state(mFinal, first, rS, sS, tx)

    def shared(self, smem, dtype, shape):
        """A row-major array in shared memory."""
        layout = cute.make_ordered_layout(shape, order=tuple(range(len(shape) - 1, -1, -1)))
        return smem.allocate_tensor(dtype, layout, byte_alignment=ALIGNMENT_BYTES)

    @cute.jit
    def copy_chunk(self, sources, ring, slot, t0, end, tx):
        """q, k, g, v of the tokens from t0 on; rows past the end repeat the last token and are never used."""
        for source, sX in zip(sources, ring, strict=True):
            self.copy_rows(source, sX[slot, None, None], t0, end, tx)

    # EVOLVE-BEGIN copy_rows
    @cute.jit
    def copy_rows(self, source, sX, t0, end, tx):
        """Rows t0 … of one operand into sX (tokens, width), 16 bytes a thread, asynchronously."""
        m, head, full, first = source
        lanes = 128 // m.element_type.width
        per_row = sX.shape[1] // lanes
        total = self.plan.tokens * per_row
        atom = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), m.element_type, num_bits_per_copy=128
        )
        # Unrolled in full, 100 copies of 64-bit addressing drove registers to 255 (1 warp, 32 tokens).
        for i in cutlass.range((total + self.plan.threads - 1) // self.plan.threads, unroll=4):
            e = i * self.plan.threads + tx
            if e < total:
                row, x = e // per_row, e % per_row * lanes
                t = cutlass.min(t0 + row, end - 1)
                src = m.iterator + (I64(t) * row_stride(m) + (head * full + first + x))
                dst = sX.iterator + (row * sX.shape[1] + x)
                cute.copy(
                    atom,
                    cute.make_tensor(src.align(16), cute.make_layout(lanes)),
                    cute.make_tensor(dst.align(16), cute.make_layout(lanes)),
                )

    # EVOLVE-END copy_rows

    @cute.jit
    def fetch_beta(self, mBeta, t0, end, hv, tx):
        """beta of token t0 + tx as fp32: a register, because rows of 2 bytes are too narrow for cp.async."""
        value = F32(0.0)
        if tx < self.plan.tokens and t0 + tx < end:
            value = (mBeta.iterator + (I64(t0 + tx) * row_stride(mBeta) + hv)).load().to(F32)
        return value

    @cute.jit
    def gate_parameters(self, mA, mBias, hv, tx):
        """exp(A_log) of the head and dt_bias of this lane's channels; unused zeros in the plain contract."""
        rBias = cute.make_rmem_tensor(self.plan.channels, F32)
        rBias.fill(0.0)
        rate = F32(0.0)
        if cutlass.const_expr(mA is not None):
            rate = cute.math.exp(mA[hv])
            for j in cutlass.range_constexpr(self.plan.channels):
                rBias[j] = mBias[hv, tx % WARP * self.plan.channels + j]
        return rate, rBias

    @cute.jit
    def prepare(self, ring, slot, ready, rate, rBias, scale, lower_bound, valid, tx):
        """One slot to fp32 rows q, k, decay in `ready`; a warp per token, K/32 channels a lane.

        Unrolled steps run past a sequence's end: rows from `valid` on get k = 0 and decay = 1, which leave
        the state as it is, bit for bit.
        """
        p = self.plan
        lane, warp = tx % WARP, tx // WARP
        for i in cutlass.range(p.tokens // p.warps, unroll=1):
            row = i * p.warps + warp
            q, k, g = [self.lane_row(sX[slot, row, None], lane) for sX in ring[:3]]
            if cutlass.const_expr(p.production):
                self.normalise(q)
                self.normalise(k)
                self.gate(g, rate, rBias, lower_bound)
            self.decay(g)
            for j in cutlass.range_constexpr(p.channels):
                q[j] = q[j] * scale
            if cutlass.const_expr(p.unroll > 1):
                for j in cutlass.range_constexpr(p.channels):
                    k[j] = k[j] if row < valid else F32(0.0)
                    g[j] = g[j] if row < valid else F32(1.0)
            for x, sX in zip((q, k, g), ready, strict=True):
                cute.autovec_copy(x, cute.local_tile(sX[row, None], (p.channels,), (lane,)))

    @cute.jit
    def lane_row(self, sRow, lane):
        """This lane's channels of a row, as fp32 in registers."""
        raw = cute.make_rmem_tensor(self.plan.channels, sRow.element_type)
        cute.autovec_copy(cute.local_tile(sRow, (self.plan.channels,), (lane,)), raw)
        x = cute.make_rmem_tensor(self.plan.channels, F32)
        x.store(raw.load().to(F32))
        return x

    @cute.jit
    def exp2(self, x):
        if cutlass.const_expr(self.plan.exp == "approximate"):
            return cute.math.exp2(x, fastmath=True)
        return cute.math.exp2(x)

    # EVOLVE-BEGIN sigmoid
    @cute.jit
    def sigmoid(self, x):
        """1 / (1 + exp(-x)); the reciprocal of an overflowed exponential is 0, as it should be."""
        return cute.arch.rcp_approx(F32(1.0) + self.exp2(x * F32(-LOG2E)))

    # EVOLVE-END sigmoid

    # EVOLVE-BEGIN normalise
    @cute.jit
    def normalise(self, x):
        """x ← x / sqrt(sum of squares + epsilon) over a token's K channels, K/32 of them in each lane."""
        square = F32(0.0)
        for j in cutlass.range_constexpr(self.plan.channels):
            square = square + x[j] * x[j]
        square = cute.arch.warp_reduction_sum(square, threads_in_group=WARP)
        norm = cute.math.rsqrt(square + F32(NORM_EPSILON), fastmath=True)
        for j in cutlass.range_constexpr(self.plan.channels):
            x[j] = x[j] * norm

    # EVOLVE-END normalise

    # EVOLVE-BEGIN gate
    @cute.jit
    def gate(self, g, rate, rBias, lower_bound):
        """g ← lower_bound · sigmoid(rate (g + bias)): the raw gate becomes a log decay."""
        for j in cutlass.range_constexpr(self.plan.channels):
            g[j] = lower_bound * self.sigmoid(rate * (g[j] + rBias[j]))

    # EVOLVE-END gate

    # EVOLVE-BEGIN decay
    @cute.jit
    def decay(self, g):
        """g ← exp(g): log decay to factor."""
        for j in cutlass.range_constexpr(self.plan.channels):
            g[j] = self.exp2(g[j] * F32(LOG2E))

    # EVOLVE-END decay

    # EVOLVE-BEGIN beta
    @cute.jit
    def beta(self, logit):
        """Strength of one token's correction, from what the tensor held."""
        value = logit
        if cutlass.const_expr(self.plan.production):
            value = self.sigmoid(logit)
        return value

    # EVOLVE-END beta

    @cute.jit
    def step(self, rS, sS, ready, sBeta, sV, i, out, tx):
        """Token i of the chunk for all of this thread's columns."""
        p = self.plan
        q, k, decay = [self.key_slice(sX[i, None], tx) for sX in ready]
        if cutlass.const_expr(p.state == "registers"):
            columns = [rS[None, c] for c in range(p.columns)]
            us = []
            for c in cutlass.range_constexpr(p.columns):
                self.forget(columns[c], decay)
                us.append(self.correction(columns[c], k, sV[i, self.plan.column_of(tx, c)].to(F32), sBeta[i]))
            for c in cutlass.range_constexpr(p.columns):
                self.update(columns[c], k, us[c])
                self.write(out, self.plan.column_of(tx, c), self.output(columns[c], q), us[c], tx)
        else:
            for c in cutlass.range_constexpr(p.columns):
                column = cute.make_rmem_tensor(p.slice, F32)
                self.move_column(sS, c, column, tx, True)
                self.forget(column, decay)
                u = self.correction(column, k, sV[i, self.plan.column_of(tx, c)].to(F32), sBeta[i])
                self.update(column, k, u)
                self.move_column(sS, c, column, tx, False)
                self.write(out, self.plan.column_of(tx, c), self.output(column, q), u, tx)

    @cute.jit
    def key_slice(self, sRow, tx):
        """This thread's part of a prepared row, in registers."""
        p = self.plan
        x = cute.make_rmem_tensor(p.slice, F32)
        for group in cutlass.range_constexpr(p.slice // p.vector):
            src = cute.make_tensor(
                (sRow.iterator + self.plan.key_of(tx, group)).align(4 * p.vector), cute.make_layout(p.vector)
            )
            cute.autovec_copy(src, cute.local_tile(x, (p.vector,), (group,)))
        return x

    # EVOLVE-BEGIN forget
    @cute.jit
    def forget(self, s, decay):
        """s ← decay · s, elementwise over this thread's slice of one column."""
        for j in cutlass.range_constexpr(self.plan.slice):
            s[j] = s[j] * decay[j]

    # EVOLVE-END forget

    # EVOLVE-BEGIN contract
    @cute.jit
    def contract(self, s, x):
        """Scalar product of a column with a key vector: partial sums in the thread, then over its lanes."""
        sums = [F32(0.0) for _ in range(self.plan.partials)]
        for j in cutlass.range_constexpr(self.plan.slice):
            sums[j % self.plan.partials] = sums[j % self.plan.partials] + s[j] * x[j]
        total = sums[0]
        for other in sums[1:]:
            total = total + other
        if cutlass.const_expr(self.plan.key_split > 1):
            total = cute.arch.warp_reduction_sum(total, threads_in_group=self.plan.key_split)
        return total

    # EVOLVE-END contract

    # EVOLVE-BEGIN correction
    @cute.jit
    def correction(self, s, k, v, beta):
        """u = beta (v − sᵀ k) for one column that has already decayed."""
        return beta * (v - self.contract(s, k))

    # EVOLVE-END correction

    # EVOLVE-BEGIN update
    @cute.jit
    def update(self, s, k, u):
        """s ← s + k u."""
        for j in cutlass.range_constexpr(self.plan.slice):
            s[j] = s[j] + k[j] * u

    # EVOLVE-END update

    # EVOLVE-BEGIN output
    @cute.jit
    def output(self, s, q):
        """One element of o: the updated column against the scaled query."""
        return self.contract(s, q)

    # EVOLVE-END output

    @cute.jit
    def write(self, out, column, y, u, tx):
        """o[t, hv, column], by the first lane of the column; with it the correction in a debug build."""
        mO, mWork, T, HV, hv, v0, t, end = out
        if tx % self.plan.key_split == 0 and (self.plan.unroll == 1 or t < end):
            offset = I64(t) * row_stride(mO) + (hv * self.plan.V + v0 + column)
            (mO.iterator + offset).store(y.to(self.io))
            if cutlass.const_expr(self.plan.debug):
                first, _ = self.plan.intermediates(T, HV)["u"]
                place = (I64(t) * HV + hv) * self.plan.V + v0 + column
                (self.floats(mWork) + (first + place)).store(u)

    def floats(self, mWork):
        """The workspace as fp32."""
        return cute.recast_ptr(mWork.iterator, dtype=F32)

    @cute.jit
    def write_prepared(self, mWork, ready, sBeta, t0, valid, T, HV, hv, v0, tx):
        """q, k, decay and beta of a chunk to the workspace; the first tile's block does it for its head."""
        p = self.plan
        where = p.intermediates(T, HV)
        if v0 == 0:
            for i in cutlass.range(valid, unroll=1):
                row = I64(t0 + i) * HV + hv
                for x in cutlass.range(tx, p.K, p.threads, unroll=1):
                    for name, sX in zip(("q", "k", "decay"), ready, strict=True):
                        (self.floats(mWork) + (where[name][0] + row * p.K + x)).store(sX[i, x])
                if tx == 0:
                    (self.floats(mWork) + (where["beta"][0] + row)).store(sBeta[i])

    @cute.jit
    def move_column(self, sS, c, column, tx, load: cutlass.Constexpr):
        """Column c of this thread between shared memory and registers; lanes touch neighbouring vectors."""
        for group in cutlass.range_constexpr(self.plan.slice // self.plan.vector):
            part = cute.local_tile(column, (self.plan.vector,), (group,))
            if cutlass.const_expr(load):
                cute.autovec_copy(sS[c, group, tx, None], part)
            else:
                cute.autovec_copy(part, sS[c, group, tx, None])

    @cute.jit
    def initial_state(self, mInitial, first, sS, tx):
        """The thread's columns from [N, HV, V, K], or zeros; in registers, or in shared memory."""
        p = self.plan
        rS = cute.make_rmem_tensor((p.slice, p.columns), F32)
        rS.fill(0.0)
        if cute.size(mInitial, mode=[0]) > 0:
            self.move_state(mInitial, first, rS, tx, True)
        if cutlass.const_expr(p.state == "shared"):
            for c in cutlass.range_constexpr(p.columns):
                self.move_column(sS, c, rS[None, c], tx, False)
        return rS

    @cute.jit
    def final_state(self, mFinal, first, rS, sS, tx):
        """The thread's columns to [N, HV, V, K], unless the tensor is empty."""
        if cute.size(mFinal, mode=[0]) > 0:
            if cutlass.const_expr(self.plan.state == "shared"):
                for c in cutlass.range_constexpr(self.plan.columns):
                    self.move_column(sS, c, rS[None, c], tx, True)
            self.move_state(mFinal, first, rS, tx, False)

    @cute.jit
    def move_state(self, m, first, rS, tx, load: cutlass.Constexpr):
        """All columns of this thread between global memory, `first` (sequence, element) on, and registers."""
        p = self.plan
        n, inside = first
        first = I64(n) * m.stride[0] + inside
        for c in cutlass.range_constexpr(p.columns):
            for group in cutlass.range_constexpr(p.slice // p.vector):
                offset = first + self.plan.column_of(tx, c) * p.K + self.plan.key_of(tx, group)
                far = cute.make_tensor((m.iterator + offset).align(4 * p.vector), cute.make_layout(p.vector))
                near = cute.local_tile(rS[None, c], (p.vector,), (group,))
                if cutlass.const_expr(load):
                    cute.autovec_copy(far, near)
                else:
                    cute.autovec_copy(near, far)


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
        fake(kernel.io, T, H, plan.K),
        fake(kernel.io, T, H, plan.K),
        fake(kernel.io, T, HV, plan.V),
        fake(kernel.gate_io, T, HV, plan.K),
        fake(kernel.gate_io, T, HV, align=kernel.gate_io.width // 8),
        *per_head,
        fake(F32, N0, HV, plan.V, plan.K),
        fake(I32, N1, align=4),
        fake(kernel.io, T, HV, plan.V),
        fake(F32, NT, HV, plan.V, plan.K),
        fake(cutlass.Uint8, W),
        *(I64(1) for _ in range(4)),
        F32(1.0),
        F32(-5.0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    return kernel, arguments
