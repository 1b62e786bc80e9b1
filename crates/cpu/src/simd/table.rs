//! The one list of vector functions, instantiated for an instruction set.

/// Makes `fn table() -> Kernels` whose entries are the functions of [`super::vector`] on `$lanes`,
/// compiled with `$features`.
///
/// The table must only be handed out by a token that proves those features.
macro_rules! table {
    ($lanes:ty, $features:literal) => {
        table!(@entries $lanes, $features,
            rms: norm::rms(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) -> ();
            rms_in_place: norm::rms_in_place(x: &mut [f32], weight: &[f32], eps: f32) -> ();
            gated_rms: norm::gated_rms(x: &mut [f32], weight: &[f32], z: &[f32], eps: f32) -> ();
            l2: norm::l2(x: &mut [f32], eps: f32, scale: f32) -> ();
            swiglu: activation::swiglu(gate: &[f32], up: &[f32], out: &mut [f32]) -> ();
            geglu: activation::geglu(gate: &[f32], up: &[f32], out: &mut [f32]) -> ();
            sigmoid_gate: activation::sigmoid_gate(x: &mut [f32], gate: &[f32]) -> ();
            add: activation::add(x: &mut [f32], y: &[f32]) -> ();
            exp_sum: activation::exp_sum(x: &mut [f32], shift: f32) -> f32;
            conv_row: conv::row(inputs: &[&[f32]], weights: &[f32], out: &mut [f32]) -> ();
            delta_read_out: delta::read_out(
                state: &[f32], token: Token<'_>, u: &mut [f32], o: &mut [f32]
            ) -> ();
            delta_update: delta::update_state(
                state: &mut [f32], k: &[f32], u: &[f32], decay: f32
            ) -> ();
            delta_update_columns: delta::update_columns(
                state: Columns<'_>, updates: &[PendingUpdate<'_>], copy: &mut [f32],
                token: Token<'_>, out: [&mut [f32]; 2]
            ) -> ();
            delta_update_read_out: delta::update_read_out(
                from: Option<&[f32]>, state: &mut [f32], update: PendingUpdate<'_>,
                token: Token<'_>, out: [&mut [f32]; 2]
            ) -> ();
            accumulate: matmul::accumulate(a: &[f32], b: &[f32], n: usize, c: &mut [f32]) -> ();
            dot_f16: kv::dot_f16(x: &[f32], bytes: &[u8]) -> f32;
            dots_f16: kv::dots_f16(queries: &[f32], key: &[u8], dots: &mut [f32]) -> ();
            dot_q8_0: kv::dot_q8_0(x: &[f32], bytes: &[u8]) -> f32;
            dot_q4_0: kv::dot_q4_0(x: &[f32], bytes: &[u8]) -> f32;
            decode_f16: kv::decode_f16(bytes: &[u8], values: &mut [f32]) -> ();
            decode_q8_0: kv::decode_q8_0(bytes: &[u8], values: &mut [f32]) -> ();
            decode_q4_0: kv::decode_q4_0(bytes: &[u8], values: &mut [f32]) -> ();
            max: rows::max(row: &[f32]) -> f32;
            sum_exp: rows::sum_exp(row: &[f32], shift: f32) -> f32;
        );
    };
    (@entries $lanes:ty, $features:literal,
        $($entry:ident: $module:ident::$name:ident($($argument:ident: $ty:ty),*) -> $result:ty;)*
    ) => {
        pub(super) fn table() -> $crate::kernels::Kernels {
            use $crate::reference::delta::{Columns, Token, PendingUpdate};
            use $crate::simd::vector::{activation, conv, delta, kv, matmul, norm, rows};
            $(
                fn $entry($($argument: $ty),*) -> $result {
                    #[target_feature(enable = $features)]
                    fn compiled($($argument: $ty),*) -> $result {
                        // SAFETY: this function is compiled for the instruction set of the lanes.
                        unsafe { $module::$name::<$lanes>($($argument),*) }
                    }
                    // SAFETY: the table is handed out by a token that proves the features.
                    unsafe { compiled($($argument),*) }
                }
            )*
            $crate::kernels::Kernels { $($entry),* }
        }
    };
}

pub(super) use table;
