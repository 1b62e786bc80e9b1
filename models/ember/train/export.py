"""placeholder"""
def hf_config(c):
    return dict(vocab_size=c.vocab, hidden_size=c.hidden, intermediate_size=c.ffn, num_hidden_layers=c.layers,
        num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, head_dim=c.head_dim,
        linear_conv_kernel_dim=c.taps, linear_key_head_dim=c.delta_dim, linear_value_head_dim=c.delta_dim,
        linear_num_key_heads=c.key_heads, linear_num_value_heads=c.value_heads, rms_norm_eps=c.eps,
        max_position_embeddings=c.context, tie_word_embeddings=True, hidden_act="silu", attention_bias=False,
        attention_dropout=0.0, full_attention_interval=c.interval,
        layer_types=["linear_attention" if c.is_linear(i) else "full_attention" for i in range(c.layers)],
        rope_parameters=dict(rope_type="default", rope_theta=c.rope_theta, partial_rotary_factor=c.rope_dims / c.head_dim,
                             mrope_section=[11, 11, 10], mrope_interleaved=True))
