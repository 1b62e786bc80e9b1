//! Laws of placements, over models of many shapes and devices of unequal memory.

use super::*;
use crate::{
    AttentionBiases, AttentionSpec, Conditioning, DenseSpec, DraftHead, FeedForward,
    GateActivation, GatedDeltaSpec, HeadMap, KvFormat, LayerSpec, Mixer, ModelHash, OutputGate,
    QuantType, RopeSpec, TokenId, WeightRef,
};

const GIB: u64 = 1 << 30;
const KV: KvFormats = KvFormats {
    k: KvFormat::Q8_0,
    v: KvFormat::Q4_0,
};

fn weight(rows: usize, cols: usize) -> WeightRef {
    WeightRef {
        name: "w".into(),
        ty: if cols.is_multiple_of(32) {
            QuantType::Q8_0
        } else {
            QuantType::F32
        },
        rows,
        cols,
    }
}

fn layer(attention: bool, ffn: usize) -> LayerSpec {
    let w = || weight(256, 256);
    LayerSpec {
        mixer_norm: weight(1, 256),
        mixer: if attention {
            Mixer::Attention(AttentionSpec {
                n_heads: 4,
                n_kv_heads: 2,
                head_dim: 64,
                rope: RopeSpec::new(64, 1e6),
                rope_factors: None,
                window: None,
                scale: 0.125,
                gate: OutputGate::None,
                q_norm: None,
                k_norm: None,
                q: w(),
                k: weight(128, 256),
                v: weight(128, 256),
                o: w(),
                biases: AttentionBiases::default(),
            })
        } else {
            Mixer::GatedDelta(GatedDeltaSpec {
                n_k_heads: 2,
                n_v_heads: 2,
                k_dim: 64,
                v_dim: 64,
                conv_taps: 4,
                head_map: HeadMap::Tiled,
                qkv: weight(384, 256),
                z: weight(128, 256),
                beta: weight(2, 256),
                alpha: weight(2, 256),
                a: weight(1, 2),
                dt: weight(1, 2),
                conv: weight(384, 4),
                norm: weight(1, 64),
                out: weight(256, 128),
            })
        },
        post_mixer_norm: None,
        ffn_norm: weight(1, 256),
        ffn: FeedForward::Dense(DenseSpec {
            activation: GateActivation::Silu,
            gate: weight(ffn, 256),
            up: weight(ffn, 256),
            down: weight(256, ffn),
        }),
        post_ffn_norm: None,
    }
}

/// Every fourth layer is attention; the feed-forwards differ by `uneven`.
fn spec(n_layers: usize, uneven: usize) -> ModelSpec {
    ModelSpec {
        name: "model".to_owned(),
        hash: ModelHash::default(),
        vocab: 1024,
        hidden: 256,
        trained_context: 4096,
        norm_eps: 1e-6,
        embedding: weight(1024, 256),
        embedding_scale: 1.0,
        layers: (0..n_layers)
            .map(|i| layer(i % 4 == 3, 256 * (1 + i % uneven.max(1))))
            .collect(),
        final_norm: weight(1, 256),
        head: weight(1024, 256),
        mtp: None,
    }
}

fn whole() -> MemoryPlan {
    MemoryPlan {
        weights_bytes: 17 * GIB + 12_345,
        kv_bytes: 8 * GIB + 77,
        state_bytes: GIB / 2 + 3,
        scratch_bytes: GIB / 4,
        draft_bytes: 2 * GIB,
        driver_bytes: GIB / 2,
        ..MemoryPlan::default()
    }
}

fn devices(gib: &[u64]) -> Vec<PlacementDevice> {
    let device = |(i, gib): (usize, &u64)| PlacementDevice {
        id: format!("cuda:{i}"),
        usable_bytes: gib * GIB,
        whole: whole(),
    };
    gib.iter().enumerate().map(device).collect()
}

fn request<'a>(
    spec: &'a ModelSpec,
    devices: &'a [PlacementDevice],
    split: &'a LayerSplit,
) -> PlacementRequest<'a> {
    PlacementRequest {
        spec,
        kv: KV,
        draft: None,
        devices,
        n_targets: devices.len(),
        split,
        draft_device: None,
    }
}

fn layers(placement: &Placement) -> Vec<Range<usize>> {
    let parts = placement.parts.iter();
    parts.map(|part| part.part.layers.clone()).collect()
}

/// Any number of devices of these memories, in an order that varies with the seed.
fn any_devices(n: usize, seed: usize) -> Vec<u64> {
    (0..n)
        .map(|i| [24, 8, 32, 16, 80][(i * 3 + seed) % 5])
        .collect()
}

#[test]
fn every_layer_is_on_one_device_in_contiguous_ranges_and_memory_adds_up() {
    for n_layers in [1, 2, 7, 24, 64] {
        for n in 1..=n_layers.min(6) {
            for seed in 0..5 {
                let spec = spec(n_layers, 1 + seed);
                let devices = devices(&any_devices(n, seed));
                let weights = (1..=n).map(|i| i as f64).collect();
                for split in [LayerSplit::ByMemory, LayerSplit::Weights(weights)] {
                    let Ok(placed) = place(&request(&spec, &devices, &split)) else {
                        // A weight may leave a device without a layer, but memory never does.
                        assert_ne!(split, LayerSplit::ByMemory);
                        continue;
                    };
                    let mut next = 0;
                    for range in layers(&placed) {
                        assert_eq!(range.start, next);
                        assert!(!range.is_empty());
                        next = range.end;
                    }
                    assert_eq!(next, n_layers);
                    let heads = placed.parts.iter().filter(|part| part.part.head).count();
                    assert_eq!((heads, placed.parts[n - 1].part.head), (1, true));
                    let (sum, whole) = (placed.memory(), whole());
                    assert_eq!(sum.weights_bytes, whole.weights_bytes);
                    // Delta states exist only where there is a delta layer, keys where attention.
                    assert!(sum.kv_bytes == whole.kv_bytes || n_layers < 4);
                    assert_eq!(sum.state_bytes, whole.state_bytes);
                    assert_eq!(sum.driver_bytes, n as u64 * whole.driver_bytes);
                }
            }
        }
    }
}

/// The peak share of memory of the best of all contiguous divisions.
fn best_peak(spec: &ModelSpec, devices: &[PlacementDevice]) -> f64 {
    let n = spec.layers.len();
    let peak = |cuts: &[usize]| {
        let mut ends = cuts.to_vec();
        ends.push(n);
        let counts = ends.iter().scan(0, |at, end| {
            let count = end - *at;
            *at = *end;
            Some(count as f64)
        });
        let split = LayerSplit::Weights(counts.collect());
        place(&request(spec, devices, &split)).map_or(f64::INFINITY, |placed| peak_of(&placed))
    };
    let mut best = f64::INFINITY;
    for a in 1..n {
        if devices.len() == 2 {
            best = best.min(peak(&[a]));
        } else {
            for b in a + 1..n {
                best = best.min(peak(&[a, b]));
            }
        }
    }
    best
}

fn peak_of(placed: &Placement) -> f64 {
    let share = |part: &PlacedPart| part.memory.total_bytes() as f64 / part.usable_bytes as f64;
    placed.parts.iter().map(share).fold(0.0, f64::max)
}

#[test]
fn division_by_memory_has_the_lowest_peak_of_all_divisions() {
    for seed in 0..5 {
        for n in [2, 3] {
            let spec = spec(20, 1 + seed);
            let devices = devices(&any_devices(n, seed));
            let placed = place(&request(&spec, &devices, &LayerSplit::ByMemory)).unwrap();
            let (found, best) = (peak_of(&placed), best_peak(&spec, &devices));
            assert!(found <= best * 1.000_01, "{found} of {best}");
        }
    }
}

#[test]
fn weights_that_add_up_to_the_layers_are_the_layers_of_each_device() {
    let (spec, devices) = (spec(64, 1), devices(&[24, 24]));
    let placed = |weights: &[f64]| {
        let split = LayerSplit::Weights(weights.to_vec());
        place(&request(&spec, &devices, &split)).map(|placed| layers(&placed))
    };
    assert_eq!(placed(&[40.0, 24.0]).unwrap(), [0..40, 40..64]);
    assert_eq!(placed(&[1.0, 1.0]).unwrap(), [0..32, 32..64]);
    assert_eq!(placed(&[0.9, 0.3]).unwrap(), [0..48, 48..64]);
    for (wrong, text) in [
        (&[1.0][..], "has 1 weights for 2 devices"),
        (&[1.0, 0.0], "cuda:1 would have none of the 64 layers"),
        (&[-1.0, 2.0], "cuda:0 would have none"),
        (&[f64::NAN, 2.0], "cuda:0 would have none"),
        (&[1000.0, 1.0], "cuda:1 would have none"),
    ] {
        let error = placed(wrong).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
}

#[test]
fn more_devices_than_layers_are_refused() {
    let (spec, devices) = (spec(2, 1), devices(&[24, 24, 24]));
    let error = place(&request(&spec, &devices, &LayerSplit::ByMemory)).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("3 devices cannot share 2 layers"),
        "{error}"
    );
}

#[test]
fn lacking_memory_is_refused_with_device_amount_and_remedy() {
    let spec = spec(64, 1);
    let refused = |gib: &[u64], split: LayerSplit| {
        let devices = devices(gib);
        let placed = place(&request(&spec, &devices, &split)).unwrap();
        placed.require_memory().unwrap_err().to_string()
    };
    // 25.5 GiB of layers and head, and 0.75 GiB on each device.
    let text = refused(&[24, 24], LayerSplit::Weights(vec![60.0, 4.0]));
    assert!(text.starts_with("cuda:0 lacks "), "{text}");
    for part in [
        "layers 0 to 59 take",
        "of 24.00 GiB",
        "cuda:1 has",
        "--target-layer-split",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let text = refused(&[8, 16], LayerSplit::ByMemory);
    for part in ["lacks", "--max-ctx", "--kv-type", "--target-devices"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let devices = devices(&[8, 24]);
    let placed = place(&request(&spec, &devices, &LayerSplit::ByMemory)).unwrap();
    placed.require_memory().unwrap();
}

#[test]
fn a_draft_goes_where_it_is_sent_and_takes_a_copy_of_the_head_it_lacks() {
    let (spec, devices) = (spec(64, 1), devices(&[24, 24, 24]));
    let draft = draft(None);
    let placed = |draft: &DraftSpec, device: Option<usize>| {
        let request = PlacementRequest {
            draft: Some(draft),
            n_targets: 2,
            draft_device: device,
            ..request(&spec, &devices, &LayerSplit::ByMemory)
        };
        place(&request).unwrap().parts
    };
    let with_head = placed(&draft, None);
    assert_eq!(with_head.len(), 2);
    let text = with_head[1].part.text();
    assert!(
        text.ends_with(" to 63, the LM head and the draft"),
        "{text}"
    );
    assert_eq!(with_head[1].memory.draft_bytes, 2 * GIB);
    let apart = placed(&draft, Some(2));
    assert_eq!(apart[2].part.text(), "the draft");
    assert_eq!(apart[2].memory.kv_bytes, 0);
    let mut narrow = Placement {
        parts: apart.clone(),
    };
    narrow.parts[2].usable_bytes = GIB;
    let text = narrow.require_memory().unwrap_err().to_string();
    for part in ["cuda:2 lacks", "the draft take", "--draft-device"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert!(apart[2].memory.draft_bytes > 2 * GIB);
    assert!(!apart[1].part.draft);
    let own_head = self::draft(Some(DraftHead {
        weight: weight(1024, 256),
        ids: None,
    }));
    let below = placed(&own_head, Some(0));
    assert_eq!((below.len(), below[0].part.draft), (2, true));
    assert_eq!(below[0].memory.draft_bytes, 2 * GIB);
    // The division by memory counts the draft.
    assert!(below[0].part.layers.len() < below[1].part.layers.len());
}

fn draft(head: Option<DraftHead>) -> DraftSpec {
    DraftSpec {
        name: "draft".to_owned(),
        hash: ModelHash::default(),
        hidden: 256,
        norm_eps: 1e-6,
        block: 4,
        first_row: 1,
        mask_token: TokenId(0),
        capture_layers: vec![1, 5],
        embedding: None,
        fc: weight(256, 512),
        hidden_norm: weight(1, 256),
        layers: Vec::new(),
        final_norm: weight(1, 256),
        head,
        logit_scale: 1.0,
        logit_softcap: None,
        conditioning: Conditioning::Independent,
    }
}
