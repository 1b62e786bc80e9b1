//! Delta kernels at the shape of a 27B hybrid model: 48 layers, 16 key and 48 value heads.
//!
//! Every layer has its own state, so a pass over the layers reads 151 MB, more than any cache.

use anyhow::Result;
use contract::HeadMap;
use cuda::GpuProps;
use cuda::Numerics;
use cuda::driver::Buffer;
use cuda::launch::gated_delta::{
    ChunkLaunch, ChunkScanKernel, GatedDeltaInputs, GatedDeltaKernel, GatedNormOutput, Group,
    Layer, Shape, Slots, StridedRows, TreeLaunch, TreeStep, commit, dfs_schedule, prefill,
    prefill::flops, prefill_scratch_bytes, verify, verify_scratch_bytes,
};
use cuda::launch::norm::ActivationBuffers;
use cuda::launch::{Launch, step_words};
use cuda::select::gated_delta_decode;

use super::{Bench, Work};

const SHAPE: Shape = Shape {
    n_k_heads: 16,
    n_v_heads: 48,
    head_map: HeadMap::Tiled,
};
const LAYERS: usize = 48;
const NODES: usize = 64;
const PROMPT: usize = 2048;

/// Times the kernels.
///
/// # Errors
/// Device errors.
pub fn run(bench: &mut Bench) -> Result<()> {
    let data = DeltaBench::new(bench)?;
    trees(bench, &data)?;
    commits(bench, &data)?;
    prompt(bench, &data)
}

fn props(bench: &Bench) -> GpuProps {
    bench.gpu.info().props()
}

/// Memory of four slots of all layers, and the inputs that layers share.
struct DeltaBench {
    state: Buffer<f32>,
    window: Buffer<f32>,
    factors: Buffer<f32>,
    weights: Buffer<f32>,
    qkv: Buffer<f32>,
    z: Buffer<f32>,
    gates: Buffer<f32>,
    scratch: Buffer<u8>,
    out: Buffer<f32>,
}

/// Pseudo-random numbers between -1 and 1.
fn noise(n: usize, scale: f32) -> Vec<f32> {
    let mut x = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        ((x >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale
    };
    (0..n).map(|_| next()).collect()
}

impl DeltaBench {
    fn new(bench: &Bench) -> Result<DeltaBench> {
        let gpu = &bench.gpu;
        let repeated = |floats: usize, scale: f32| -> Result<Buffer<f32>> {
            let piece = noise((1 << 20) - 7, scale);
            let all: Vec<f32> = piece.iter().copied().cycle().take(floats).collect();
            Ok(gpu.upload(&all)?)
        };
        let steps = verify_scratch_bytes(
            props(bench),
            SHAPE,
            NODES,
            4,
            GatedDeltaKernel::RecurrentTree,
        );
        let scratch = prefill_scratch_bytes(SHAPE, PROMPT).max(steps);
        Ok(DeltaBench {
            state: repeated(4 * LAYERS * SHAPE.state_bytes() / 4, 0.1)?,
            window: repeated(4 * LAYERS * SHAPE.window_bytes() / 4, 1.0)?,
            factors: repeated(4 * LAYERS * SHAPE.factor_bytes(NODES) / 4, -0.1)?,
            weights: repeated(SHAPE.channels() * 4 + 2 * 64 + 128, 0.5)?,
            qkv: repeated(PROMPT * SHAPE.channels(), 1.0)?,
            z: repeated(PROMPT * SHAPE.values(), 1.0)?,
            gates: repeated(PROMPT * 2 * SHAPE.n_v_heads, 1.0)?,
            scratch: gpu.alloc(scratch)?,
            out: gpu.alloc(PROMPT * SHAPE.values())?,
        })
    }

    fn slots(base: u64, bytes: usize, layer: usize) -> Slots {
        Slots {
            at: base + (layer * bytes) as u64,
            stride: (LAYERS * bytes) as u64,
        }
    }

    fn layer(&self, layer: usize) -> Layer {
        let weights = |floats: usize| self.weights.ptr() + 4 * floats as u64;
        let vectors = SHAPE.channels() * 4;
        Layer {
            state: DeltaBench::slots(self.state.ptr(), SHAPE.state_bytes(), layer),
            window: DeltaBench::slots(self.window.ptr(), SHAPE.window_bytes(), layer),
            factors: DeltaBench::slots(self.factors.ptr(), SHAPE.factor_bytes(NODES), layer),
            conv: weights(0),
            a: weights(vectors),
            dt: weights(vectors + 64),
            norm: weights(vectors + 128),
            eps: 1e-6,
        }
    }

    fn inputs(&self) -> GatedDeltaInputs {
        let rows = |at: u64, stride: usize| StridedRows { at, stride };
        let heads = SHAPE.n_v_heads;
        GatedDeltaInputs {
            qkv: rows(self.qkv.ptr(), SHAPE.channels()),
            z: rows(self.z.ptr(), SHAPE.values()),
            alpha: rows(self.gates.ptr(), 2 * heads),
            beta: rows(self.gates.ptr() + 4 * heads as u64, 2 * heads),
        }
    }

    fn out(&self) -> GatedNormOutput {
        GatedNormOutput::of(ActivationBuffers::f32(self.out.ptr()))
    }
}

/// The shape of a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TreeShape {
    /// The most likely nodes of a draft with candidate probabilities near [`LIKELY`].
    BestFirst,
    /// The parent is one of the two previous nodes: nearly a chain.
    Chain,
}

/// Probabilities of a node's children, the draft's first choice first.
const LIKELY: [f64; 5] = [0.72, 0.13, 0.06, 0.03, 0.015];

/// Parents of the nodes of the tree of `seed`.
fn parents(form: TreeShape, nodes: usize, seed: u64) -> Vec<Option<usize>> {
    let mut x = 0x9e37_79b9_7f4a_7c15_u64 ^ (seed << 20);
    let mut scatter = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        0.5 + (x >> 40) as f64 / (1 << 24) as f64
    };
    let mut parents = vec![None];
    let mut waiting: Vec<(f64, usize)> = Vec::new();
    let mut likely = 1.0;
    while parents.len() < nodes {
        let node = parents.len() - 1;
        if form == TreeShape::Chain {
            let back = (7 * (node + 1) % 3).min(node).min(1);
            parents.push(Some(node - back));
            continue;
        }
        waiting.extend(LIKELY.map(|p| (likely * (p * scatter()).min(0.98), node)));
        let best = (0..waiting.len()).max_by(|&a, &b| waiting[a].0.total_cmp(&waiting[b].0));
        let (p, parent) = waiting.swap_remove(best.expect("every node has put its children there"));
        likely = p;
        parents.push(Some(parent));
    }
    parents
}

/// A `Step` of `trees` trees of `nodes` nodes.
fn step(trees: usize, nodes: usize, form: TreeShape) -> Vec<i32> {
    let mut words = vec![0_i32; step_words::STEP];
    let field = |at: usize| step_words::TOKEN + 64 * at;
    words[field(2)..field(4)].fill(-1);
    words[0] = (trees * nodes) as i32;
    words[1] = trees as i32;
    for tree in 0..trees {
        let first = tree * nodes;
        words[4 + 4 * tree..][..4].copy_from_slice(&[tree as i32, 0, first as i32, nodes as i32]);
        let parents = parents(form, nodes, tree as u64);
        for (part, list) in dfs_schedule::header(&parents).iter().enumerate() {
            for (at, &word) in list.iter().enumerate() {
                words[step_words::SCHEDULE + 64 * part + first + at] = word as i32;
            }
        }
        let mut masks: Vec<u64> = Vec::new();
        for (node, parent) in parents.into_iter().enumerate() {
            let row = first + node;
            words[field(2) + row] = tree as i32;
            words[field(3) + row] = parent.map_or(-1, |p| (first + p) as i32);
            let mask = parent.map_or(0, |p| masks[p]) | 1 << node;
            masks.push(mask);
            words[field(4) + row] = mask.count_ones() as i32 - 1;
            words[field(5) + 2 * row] = mask as i32;
            words[field(5) + 2 * row + 1] = (mask >> 32) as i32;
        }
    }
    words
}

/// The launches of all layers for a step of `count` trees of `nodes` nodes.
struct TreeCase {
    count: usize,
    nodes: usize,
    form: TreeShape,
    numerics: Numerics,
    layers: Vec<Vec<Launch>>,
    _header: Buffer<i32>,
}

impl TreeCase {
    fn new(
        bench: &Bench,
        data: &DeltaBench,
        (count, nodes, form): (usize, usize, TreeShape),
        numerics: Numerics,
    ) -> Result<TreeCase> {
        let header = bench.gpu.upload(&step(count, nodes, form))?;
        let props = props(bench);
        let trees = TreeStep {
            rows: count * nodes,
            trees: count,
        };
        let kernel = gated_delta_decode(props, SHAPE, numerics, trees).kernel;
        let layer = |layer: usize| {
            let tree = TreeLaunch {
                gpu: props,
                shape: SHAPE,
                size: trees,
                step: header.ptr(),
                layer: &data.layer(layer),
                inputs: &data.inputs(),
            };
            verify(kernel, &tree, data.scratch.ptr(), &data.out())
        };
        Ok(TreeCase {
            count,
            nodes,
            form,
            numerics,
            layers: (0..LAYERS).map(layer).collect(),
            _header: header,
        })
    }
}

fn trees(bench: &mut Bench, data: &DeltaBench) -> Result<()> {
    let state = SHAPE.state_bytes() as f64;
    let one = [1, 8, 16, 22, 24, 32, 48, 64].map(|nodes| (1, nodes, TreeShape::BestFirst));
    let several = [(2, 24), (4, 8)].map(|(count, nodes)| (count, nodes, TreeShape::BestFirst));
    let hard = [22, 64].map(|nodes| (1, nodes, TreeShape::Chain));
    let mut cases = Vec::new();
    for size in one.into_iter().chain(several).chain(hard) {
        cases.push(TreeCase::new(bench, data, size, Numerics::Fastest)?);
        if size.1 > 1 {
            cases.push(TreeCase::new(bench, data, size, Numerics::BatchInvariant)?);
        }
    }
    // One call, so that units compile in parallel.
    let first_layers = cases.iter().flat_map(|case| &case.layers[0]);
    let units: Vec<_> = first_layers.map(|l| l.unit.clone()).collect();
    let modules = bench.modules(&units)?;
    for case in &cases {
        let (count, nodes) = (case.count, case.nodes);
        let row_bytes = 4.0 * (2 * SHAPE.channels() + SHAPE.values()) as f64;
        let moved = Work {
            bytes: count as f64 * state + (count * nodes) as f64 * row_bytes,
            flops: 0.0,
        };
        let name = match case.form {
            TreeShape::BestFirst => format!("{count} x {nodes} nodes"),
            TreeShape::Chain => format!("{count} x {nodes} nodes, nearly chains"),
        };
        for part in 0..case.layers[0].len() {
            let same: Vec<&Launch> = case.layers.iter().map(|layer| &layer[part]).collect();
            let entry = same[0].entry;
            let work = match entry {
                "gated_delta_wy_tree" | "gated_delta_recurrent_tree" => moved,
                _ => Work::default(),
            };
            bench.case("delta", &format!("{entry} {name}"), &modules, &same, work)?;
        }
        let all = Work {
            bytes: moved.bytes * LAYERS as f64,
            flops: 0.0,
        };
        let trees: Vec<&Launch> = case.layers.iter().map(|layer| &layer[0]).collect();
        let label = format!("48 layers {name}, {:?}", case.numerics);
        bench.sequence("delta", &label, &modules, &trees, all)?;
        let together: Vec<&Launch> = case.layers.iter().flatten().collect();
        bench.sequence("delta", &format!("{label}, norm"), &modules, &together, all)?;
    }
    Ok(())
}

fn commits(bench: &mut Bench, data: &DeltaBench) -> Result<()> {
    let layer = data.layer(0);
    let group = Group {
        layers: LAYERS,
        state: layer.state,
        window: layer.window,
        factors: layer.factors,
        layer_strides: [
            SHAPE.state_bytes() as u64,
            SHAPE.window_bytes() as u64,
            SHAPE.factor_bytes(NODES) as u64,
        ],
    };
    for length in [1, 8, 16] {
        let mut words = vec![0_i32; step_words::COMMIT];
        words[0] = 1;
        words[6] = length;
        for (i, entry) in words[8..].iter_mut().enumerate().take(length as usize) {
            *entry = i as i32;
        }
        let header = bench.gpu.upload(&words)?;
        let launch = commit(SHAPE, &group, 1, header.ptr());
        let modules = bench.modules(std::slice::from_ref(&launch.unit))?;
        let work = Work {
            bytes: 2.0 * (LAYERS * (SHAPE.state_bytes() + SHAPE.window_bytes())) as f64,
            flops: 0.0,
        };
        let case = format!("commit 48 layers, path of {length}");
        bench.case("delta", &case, &modules, &[&launch], work)?;
    }
    Ok(())
}

fn prompt(bench: &mut Bench, data: &DeltaBench) -> Result<()> {
    let mut words = vec![0_i32; 68];
    words[0] = PROMPT as i32;
    let header = bench.gpu.upload(&words)?;
    let kernels: &[ChunkScanKernel] = if bench.gpu.arch().to_string() == "sm_90a" {
        &[ChunkScanKernel::Mma, ChunkScanKernel::Sm90]
    } else {
        &[ChunkScanKernel::Mma]
    };
    for &kernel in kernels {
        prompt_with(bench, data, kernel, header.ptr())?;
    }
    Ok(())
}

fn prompt_with(
    bench: &mut Bench,
    data: &DeltaBench,
    kernel: ChunkScanKernel,
    header: u64,
) -> Result<()> {
    let make = |layer: usize| {
        let chunk = ChunkLaunch {
            shape: SHAPE,
            rows: PROMPT,
            chunk: header,
            layer: &data.layer(layer),
            inputs: &data.inputs(),
        };
        prefill(kernel, &chunk, data.scratch.ptr(), &data.out())
    };
    let layers: Vec<_> = (0..8).map(make).collect();
    let units: Vec<_> = layers[0].iter().map(|l| l.unit.clone()).collect();
    let modules = bench.modules(&units)?;
    let flops = flops(SHAPE, PROMPT);
    for part in 0..layers[0].len() {
        let same: Vec<&Launch> = layers.iter().map(|layer| &layer[part]).collect();
        let case = format!("{}, {PROMPT} tokens", same[0].entry);
        bench.case("delta", &case, &modules, &same, Work::default())?;
    }
    let together: Vec<&Launch> = layers[0].iter().collect();
    let row_bytes = 4.0 * (SHAPE.channels() + 2 * SHAPE.values()) as f64;
    let work = Work {
        bytes: 2.0 * SHAPE.state_bytes() as f64 + PROMPT as f64 * row_bytes,
        flops,
    };
    let case = format!("prefill by {kernel:?}, {PROMPT} tokens, 1 layer");
    bench.sequence("delta", &case, &modules, &together, work)?;
    Ok(())
}
