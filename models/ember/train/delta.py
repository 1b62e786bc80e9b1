"""The gated delta rule: token by token (the oracle), in chunks (training, prefill), one step (decoding).

Shapes: q, k [B, T, key heads, 128]; v [B, T, value heads, 128]; g, beta [B, T, value heads].
Value head i reads key head i // (value heads / key heads), the order of the Hugging Face checkpoint.
q and k arrive L2-normalised and q is already scaled by 1/sqrt(128); g <= 0 is the log of the decay.

The chunked form is section 3.2 of the format notes: inside a chunk of 64 tokens everything is a
matrix product; only the state passing from chunk to chunk is sequential. That scan is two small
Triton kernels on a GPU and a plain loop elsewhere; both give the same numbers.
"""
import os

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # the loops below need no Triton
    triton = None

CHUNK = 64
KERNELS = False  # set by the trainer: the kernels are for long rows; short ones in evaluation take the loops
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # runs the kernels on the CPU, for tests


def recurrent(q, k, v, g, beta, state=None):
    """One token after the other in the input precision. Returns o [B, T, Hv, D] and the last state."""
    reps = v.shape[2] // q.shape[2]
    q, k = q.repeat_interleave(reps, 2), k.repeat_interleave(reps, 2)
    if state is None:
        state = q.new_zeros(q.shape[0], v.shape[2], q.shape[3], v.shape[3])
    out = []
    for t in range(q.shape[1]):
        o, state = step(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], state)
        out.append(o)
    return torch.stack(out, 1), state


def step(q, k, v, g, beta, state):
    """One token: q, k, v [B, Hv, D]; g, beta [B, Hv]; state [B, Hv, D, D]. Returns o and the new state."""
    state = state * g.exp()[..., None, None]
    delta = beta[..., None] * (v - torch.einsum("bhkv,bhk->bhv", state, k))
    state = state + k[..., :, None] * delta[..., None, :]
    return torch.einsum("bhkv,bhk->bhv", state, q), state


def _chunks(x, reps=1):
    """[B, T, H, D] -> [B, H * reps, n, C, D]."""
    x = x.unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2, 4)
    return x.repeat_interleave(reps, 1) if reps > 1 else x


def intra(q, k, g, beta, reps):
    """All that depends on one chunk alone and needs no solve.

    Returns A [.., C, C] f32 (strictly lower), P [.., C, C] (scores with decay), and c [.., C] f32.
    """
    k4, q4 = _chunks(k), _chunks(q)
    c = g.unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2).float().cumsum(-1)
    b = beta.unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2).float()
    ones = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device)
    decay = (c[..., :, None] - c[..., None, :]).masked_fill(~ones.tril(), float("-inf")).exp()
    kk = (k4 @ k4.transpose(-1, -2)).repeat_interleave(reps, 1)
    qk = (q4 @ k4.transpose(-1, -2)).repeat_interleave(reps, 1)
    a = (kk * decay * b[..., None]).masked_fill(~ones.tril(-1), 0.0)
    return a, qk * decay, c


def inputs_of_scan(t, k, v, c, beta, q, reps):
    """W, U, decayed keys, decayed queries and the decay of whole chunks, in the precision of v."""
    b = beta.unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2).float()
    k4, q4, v4 = _chunks(k, reps), _chunks(q, reps), _chunks(v)
    kind = v.dtype
    t = t.to(kind)
    u = t @ (v4 * b[..., None]).to(kind)
    w = t @ (k4 * (b * c.exp())[..., None]).to(kind)
    kd = (k4 * (c[..., -1:] - c).exp()[..., None]).to(kind)
    qe = (q4 * c.exp()[..., None]).to(kind)
    return w, u, kd, qe, c[..., -1].exp().contiguous()


def outputs_of_scan(qe, s, p, vn):
    """O = qe S + P V', back to [B, T, H, D]."""
    o = qe @ s + p.to(vn.dtype) @ vn
    return o.permute(0, 2, 3, 1, 4).flatten(1, 2)


def chunked(q, k, v, g, beta, state=None):
    """The same function as `recurrent`, chunk by chunk; any length. Returns o and the last state."""
    length, reps = q.shape[1], v.shape[2] // q.shape[2]
    pad = -length % CHUNK
    if pad:  # zero keys, values and gates leave the state as it is
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, pad)) for x in (q, k, v))
        g, beta = (F.pad(x, (0, 0, 0, pad)) for x in (g, beta))
    a, p, c = intra(q, k, g, beta, reps)
    w, u, kd, qe, dec = inputs_of_scan(TriInverse.apply(a), k, v, c, beta, q, reps)
    vn, s, last = scan_forward(w, u, kd, dec, state)
    return outputs_of_scan(qe, s, p, vn)[:, :length], last


if triton is not None:
    @triton.jit
    def _inverse_kernel(a_ptr, t_ptr, C: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * C * C
        row = tl.arange(0, C)
        offsets = row[:, None] * C + row[None, :]
        b = -tl.load(a_ptr + at + offsets)
        for i in range(1, C):
            mine = row == i
            x = tl.sum(tl.where(mine[:, None], b, 0.0), 0)
            x = x + tl.sum(x[:, None] * b, 0)
            b = tl.where(mine[:, None], x[None, :], b)
        b = b + tl.where(row[:, None] == row[None, :], 1.0, 0.0)
        tl.store(t_ptr + at + offsets, b)

    @triton.jit
    def _scan_forward_kernel(w_ptr, u_ptr, kd_ptr, dec_ptr, s0_ptr, s_ptr, v_ptr, last_ptr, n,
                             D: tl.constexpr, C: tl.constexpr, BV: tl.constexpr):
        head = tl.program_id(1).to(tl.int64)
        ok, oc = tl.arange(0, D), tl.arange(0, C)
        ov = tl.program_id(0) * BV + tl.arange(0, BV)
        state_at = ok[:, None] * D + ov[None, :]
        state = tl.load(s0_ptr + head * D * D + state_at)
        for i in range(n):
            at = head * n + i
            w = tl.load(w_ptr + at * C * D + oc[:, None] * D + ok[None, :])
            u = tl.load(u_ptr + at * C * D + oc[:, None] * D + ov[None, :])
            kd = tl.load(kd_ptr + at * C * D + oc[None, :] * D + ok[:, None])
            low = state.to(w.dtype)
            tl.store(s_ptr + at * D * D + state_at, low)
            vn = (u.to(tl.float32) - tl.dot(w, low)).to(w.dtype)
            tl.store(v_ptr + at * C * D + oc[:, None] * D + ov[None, :], vn)
            state = state * tl.load(dec_ptr + at) + tl.dot(kd, vn)
        tl.store(last_ptr + head * D * D + state_at, state)

    @triton.jit
    def _scan_backward_kernel(w_ptr, kd_ptr, dec_ptr, dv_ptr, ds_ptr, du_ptr, dnext_ptr, n,
                              D: tl.constexpr, C: tl.constexpr, BV: tl.constexpr):
        head = tl.program_id(1).to(tl.int64)
        ok, oc = tl.arange(0, D), tl.arange(0, C)
        ov = tl.program_id(0) * BV + tl.arange(0, BV)
        state_at = ok[:, None] * D + ov[None, :]
        grad = tl.zeros([D, BV], dtype=tl.float32)
        for j in range(n):
            at = head * n + (n - 1 - j)
            w = tl.load(w_ptr + at * C * D + oc[None, :] * D + ok[:, None])
            kd = tl.load(kd_ptr + at * C * D + oc[:, None] * D + ok[None, :])
            low = grad.to(w.dtype)
            tl.store(dnext_ptr + at * D * D + state_at, low)
            dv = tl.load(dv_ptr + at * C * D + oc[:, None] * D + ov[None, :]).to(tl.float32) + tl.dot(kd, low)
            du = dv.to(w.dtype)
            tl.store(du_ptr + at * C * D + oc[:, None] * D + ov[None, :], du)
            ds = tl.load(ds_ptr + at * D * D + state_at).to(tl.float32)
            grad = grad * tl.load(dec_ptr + at) + ds - tl.dot(w, du)


def _on_gpu(x):
    return triton is not None and (INTERPRETED or (KERNELS and x.is_cuda))


class TriInverse(torch.autograd.Function):
    """(I + A)^-1 for strictly lower triangular A [..., C, C] f32."""

    @staticmethod
    def forward(ctx, a):
        if _on_gpu(a):
            a = a.contiguous()
            t = torch.empty_like(a)
            _inverse_kernel[(a.numel() // (CHUNK * CHUNK),)](a, t, C=CHUNK, num_warps=4)
        else:
            eye = torch.eye(CHUNK, dtype=a.dtype, device=a.device)
            t = torch.linalg.solve_triangular(a + eye, eye.expand_as(a), upper=False, unitriangular=True)
        ctx.save_for_backward(t)
        return t

    @staticmethod
    def backward(ctx, dt):
        (t,) = ctx.saved_tensors
        tt = t.transpose(-1, -2)
        return -(tt @ dt @ tt).tril(-1)


def _slice_width(heads):
    """Columns of the state per program: narrow slices when few heads would leave the chip idle."""
    return 64 if heads >= 256 else 32 if heads >= 96 else 16


def scan_forward(w, u, kd, dec, state=None):
    """w, u, kd [B, H, n, C, D]; dec [B, H, n]. Returns V' (like u), the state before each chunk
    [B, H, n, D, D] in the precision of w, and the last state in f32."""
    batch, heads, n, _, d = w.shape
    s0 = torch.zeros(batch, heads, d, d, device=w.device, dtype=torch.promote_types(w.dtype, torch.float32))
    if state is not None:
        s0.copy_(state)
    if _on_gpu(w):
        w, u, kd, dec = w.contiguous(), u.contiguous(), kd.contiguous(), dec.contiguous()
        s = torch.empty(batch, heads, n, d, d, device=w.device, dtype=w.dtype)
        vn, last = torch.empty_like(u), torch.empty_like(s0)
        width = _slice_width(batch * heads)
        _scan_forward_kernel[(d // width, batch * heads)](
            w, u, kd, dec, s0, s, vn, last, n, D=d, C=CHUNK, BV=width, num_warps=4, num_stages=2)
        return vn, s, last
    states, values = [], []
    for i in range(n):
        states.append(s0.to(w.dtype))
        values.append(u[:, :, i] - w[:, :, i] @ states[-1])
        s0 = s0 * dec[:, :, i, None, None] + kd[:, :, i].transpose(-1, -2) @ values[-1]
    return torch.stack(values, 2), torch.stack(states, 2), s0


class Scan(torch.autograd.Function):
    """`scan_forward` from an empty state, with its gradient. Returns V' and the states before each chunk."""

    @staticmethod
    def forward(ctx, w, u, kd, dec):
        vn, s, _ = scan_forward(w, u, kd, dec)
        ctx.save_for_backward(w, kd, dec, vn, s)
        return vn, s

    @staticmethod
    def backward(ctx, dvn, ds):
        w, kd, dec, vn, s = ctx.saved_tensors
        batch, heads, n, _, d = w.shape
        if _on_gpu(w):
            w, kd, dvn, ds = w.contiguous(), kd.contiguous(), dvn.contiguous(), ds.contiguous()
            du, dnext = torch.empty_like(vn), torch.empty_like(s)
            width = _slice_width(batch * heads)
            _scan_backward_kernel[(d // width, batch * heads)](
                w, kd, dec, dvn, ds, du, dnext, n, D=d, C=CHUNK, BV=width, num_warps=4, num_stages=2)
        else:
            grad = torch.zeros_like(s[:, :, 0], dtype=torch.promote_types(s.dtype, torch.float32))
            dus, nexts = [None] * n, [None] * n
            for i in reversed(range(n)):
                nexts[i] = grad.to(s.dtype)
                dus[i] = dvn[:, :, i] + kd[:, :, i] @ nexts[i]
                grad = grad * dec[:, :, i, None, None] + ds[:, :, i] - w[:, :, i].transpose(-1, -2) @ dus[i]
            du, dnext = torch.stack(dus, 2), torch.stack(nexts, 2)
        dw = -(du @ s.transpose(-1, -2))
        dkd = vn @ dnext.transpose(-1, -2)
        ddec = (s * dnext).sum((-1, -2), dtype=dec.dtype)
        return dw, du, dkd, ddec
