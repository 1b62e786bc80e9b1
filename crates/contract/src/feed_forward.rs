//! The feed-forward of a layer: dense, or a mixture of experts.

use crate::{WeightError, WeightRef};

/// The part of a layer that works on each position alone.
#[derive(Debug, Clone, PartialEq)]
pub enum FeedForward {
    /// One feed-forward for every row.
    Dense(DenseSpec),
    /// Each row uses a few of many feed-forwards.
    Experts(Box<MoeSpec>),
}

/// A gated feed-forward: `down · (activation(gate · x) * (up · x))`.
#[derive(Debug, Clone, PartialEq)]
pub struct DenseSpec {
    /// The function of the gate.
    pub activation: GateActivation,
    /// `[ffn, hidden]`.
    pub gate: WeightRef,
    /// `[ffn, hidden]`.
    pub up: WeightRef,
    /// `[hidden, ffn]`.
    pub down: WeightRef,
}

/// The function of a feed-forward's gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateActivation {
    /// `x * sigmoid(x)`.
    Silu,
    /// The Gaussian error linear unit by its tanh formula (arXiv 1606.08415).
    GeluTanh,
}

/// A mixture of experts: a router chooses `n_used` of `n_experts` feed-forwards for each row.
///
/// ```text
/// p    = softmax(router · x)                                  [n_experts]
/// S    = the n_used experts of largest p; of equal ones, those of lower index
/// w[e] = weights_scale * p[e] / max(sum of p over S, MIN_WEIGHT_SUM)
/// y    = sum over S of w[e] * expert_e(x)  +  sigmoid(shared.gate · x) * shared.ffn(x)
/// ```
///
/// The router is computed in f32 on every device, whatever type stores it: rounded activations
/// would choose other experts.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeSpec {
    /// Number of experts.
    pub n_experts: usize,
    /// Experts per row, 1 to `n_experts`.
    pub n_used: usize,
    /// Factor on the experts' weights; 1 in most models.
    pub weights_scale: f32,
    /// The function of the experts' gates.
    pub activation: GateActivation,
    /// `[n_experts, hidden]`.
    pub router: WeightRef,
    /// The projections into the experts.
    pub gate_up: ExpertGateUp,
    /// `[n_experts, hidden, ffn]`.
    pub down: ExpertStack,
    /// The expert of every row, if there is one.
    pub shared: Option<SharedExpertSpec>,
}

/// Matrices of one shape in one tensor, one per expert.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertStack {
    /// All experts' rows, expert by expert, without padding in between.
    pub weight: WeightRef,
    /// Number of experts.
    pub n_experts: usize,
}

/// The gate and up projections of all experts.
#[derive(Debug, Clone, PartialEq)]
pub enum ExpertGateUp {
    /// A tensor each.
    Separate {
        /// `[n_experts, ffn, hidden]`.
        gate: ExpertStack,
        /// `[n_experts, ffn, hidden]`.
        up: ExpertStack,
    },
    /// `[n_experts, 2 * ffn, hidden]`: an expert's rows are `ffn` of gate, then `ffn` of up.
    Fused(ExpertStack),
}

/// A feed-forward that every row uses beside its experts.
#[derive(Debug, Clone, PartialEq)]
pub struct SharedExpertSpec {
    /// `[hidden]`: the sigmoid of its product with a row is the factor on the output.
    pub gate: WeightRef,
    /// The feed-forward.
    pub ffn: DenseSpec,
}

impl FeedForward {
    /// The dense feed-forward, if it is one.
    pub fn dense(&self) -> Option<&DenseSpec> {
        match self {
            FeedForward::Dense(dense) => Some(dense),
            FeedForward::Experts(_) => None,
        }
    }

    /// The mixture of experts, if it is one.
    pub fn experts(&self) -> Option<&MoeSpec> {
        match self {
            FeedForward::Dense(_) => None,
            FeedForward::Experts(experts) => Some(&**experts),
        }
    }

    /// The function of the gates.
    pub fn activation(&self) -> GateActivation {
        match self {
            FeedForward::Dense(dense) => dense.activation,
            FeedForward::Experts(experts) => experts.activation,
        }
    }

    /// Every weight.
    pub fn weights(&self) -> Vec<&WeightRef> {
        match self {
            FeedForward::Dense(dense) => dense.matrices().to_vec(),
            FeedForward::Experts(experts) => experts.weights(),
        }
    }

    /// Checks the shape of every weight for rows of `hidden` values.
    ///
    /// # Errors
    /// [`WeightError::Mismatch`] of the first weight that disagrees with the others.
    pub fn require_shapes(&self, hidden: usize) -> Result<(), WeightError> {
        match self {
            FeedForward::Dense(dense) => dense.require_shapes(hidden),
            FeedForward::Experts(experts) => experts.require_shapes(hidden),
        }
    }
}

impl DenseSpec {
    /// The channels between the projections.
    pub fn width(&self) -> usize {
        self.gate.rows
    }

    /// Gate, up and down.
    pub fn matrices(&self) -> [&WeightRef; 3] {
        [&self.gate, &self.up, &self.down]
    }

    /// As [`FeedForward::require_shapes`].
    ///
    /// # Errors
    /// [`WeightError::Mismatch`] of the first weight that disagrees with the others.
    pub fn require_shapes(&self, hidden: usize) -> Result<(), WeightError> {
        self.gate.require_shape(self.width(), hidden)?;
        self.up.require_shape(self.width(), hidden)?;
        self.down.require_shape(hidden, self.width())
    }
}

impl MoeSpec {
    /// The least sum that chosen probabilities are divided by: the smallest normal f16.
    pub const MIN_WEIGHT_SUM: f32 = 1.0 / 16384.0;

    /// The channels between the projections of an expert.
    pub fn width(&self) -> usize {
        self.down.cols()
    }

    /// The experts' tensors.
    pub fn stacks(&self) -> Vec<&ExpertStack> {
        let mut all = match &self.gate_up {
            ExpertGateUp::Separate { gate, up } => vec![gate, up],
            ExpertGateUp::Fused(fused) => vec![fused],
        };
        all.push(&self.down);
        all
    }

    /// Every weight.
    pub fn weights(&self) -> Vec<&WeightRef> {
        let mut all = vec![&self.router];
        all.extend(self.stacks().into_iter().map(|stack| &stack.weight));
        if let Some(shared) = &self.shared {
            all.push(&shared.gate);
            all.extend(shared.ffn.matrices());
        }
        all
    }

    fn require_shapes(&self, hidden: usize) -> Result<(), WeightError> {
        let (n, width) = (self.n_experts, self.width());
        if !(1..=n).contains(&self.n_used) {
            let detail = format!("{} of {n} experts cannot be chosen", self.n_used);
            return Err(self.router.mismatch(&detail));
        }
        self.router.require_shape(n, hidden)?;
        for stack in self.stacks() {
            if stack.n_experts != n {
                let detail = format!("{} experts, the router has {n}", stack.n_experts);
                return Err(stack.weight.mismatch(&detail));
            }
        }
        match &self.gate_up {
            ExpertGateUp::Separate { gate, up } => {
                gate.weight.require_shape(n * width, hidden)?;
                up.weight.require_shape(n * width, hidden)?;
            }
            ExpertGateUp::Fused(fused) => fused.weight.require_shape(n * 2 * width, hidden)?,
        }
        self.down.weight.require_shape(n * hidden, width)?;
        let Some(shared) = &self.shared else {
            return Ok(());
        };
        shared.gate.require_shape(1, hidden)?;
        shared.ffn.require_shapes(hidden)
    }

    /// How many experts `rows` rows touch on average, if each row's choice is uniform and
    /// independent: `n_experts * (1 - (1 - n_used / n_experts)^rows)`.
    pub fn expected_touched(&self, rows: usize) -> f64 {
        let n = self.n_experts as f64;
        let untouched = 1.0 - self.n_used as f64 / n;
        n * (1.0 - untouched.powf(rows as f64))
    }
}

impl ExpertStack {
    /// Rows (outputs) of one expert.
    pub fn rows(&self) -> usize {
        self.weight.rows / self.n_experts
    }

    /// Columns (inputs) of one expert.
    pub fn cols(&self) -> usize {
        self.weight.cols
    }

    /// Bytes from one expert to the next.
    pub fn expert_bytes(&self) -> usize {
        self.rows() * self.weight.ty.row_bytes(self.cols())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::QuantType;

    fn stack(name: &str, n_experts: usize, rows: usize, cols: usize) -> ExpertStack {
        let weight = WeightRef {
            name: name.into(),
            ty: QuantType::Q8_0,
            rows: n_experts * rows,
            cols,
        };
        ExpertStack { weight, n_experts }
    }

    fn moe() -> MoeSpec {
        MoeSpec {
            n_experts: 256,
            n_used: 8,
            weights_scale: 1.0,
            activation: GateActivation::Silu,
            router: stack("router", 256, 1, 64).weight,
            gate_up: ExpertGateUp::Fused(stack("gate_up", 256, 64, 64)),
            down: stack("down", 256, 64, 32),
            shared: None,
        }
    }

    #[test]
    fn rows_touch_the_published_shares_of_experts() {
        let moe = moe();
        let share = |rows| moe.expected_touched(rows) / 8.0;
        assert_eq!(share(1), 1.0);
        assert!((3.8..3.9).contains(&share(4)), "{}", share(4));
        assert!(share(1000) <= 32.0);
        assert_eq!((moe.width(), moe.down.rows()), (32, 64));
        assert_eq!(moe.down.expert_bytes(), 64 * 34);
    }

    #[test]
    fn experts_that_disagree_are_refused_by_name() {
        let refusal = |change: &dyn Fn(&mut MoeSpec)| {
            let mut moe = moe();
            change(&mut moe);
            let checked = FeedForward::Experts(Box::new(moe)).require_shapes(64);
            checked.err().map(|error| error.to_string())
        };
        assert_eq!(refusal(&|_| ()), None);
        let none = "tensor router: 0 of 256 experts cannot be chosen";
        assert_eq!(refusal(&|moe| moe.n_used = 0).as_deref(), Some(none));
        let fewer = "tensor down: 255 experts, the router has 256";
        let change = |moe: &mut MoeSpec| moe.down = stack("down", 255, 64, 32);
        assert_eq!(refusal(&change).as_deref(), Some(fewer));
        let fused = "tensor gate_up: [8192, 64] found, [16384, 64] expected";
        let half = ExpertGateUp::Fused(stack("gate_up", 256, 32, 64));
        let change = |moe: &mut MoeSpec| moe.gate_up = half.clone();
        assert_eq!(refusal(&change).as_deref(), Some(fused));
        let odd = "tensor router: [256, 63] cannot be stored as Q8_0";
        let mut narrow = moe();
        narrow.router.cols = 63;
        let error = FeedForward::Experts(Box::new(narrow)).require_shapes(63);
        assert_eq!(error.unwrap_err().to_string(), odd);
    }
}
