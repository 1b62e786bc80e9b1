//! Machine code as `nvdisasm -c` prints it: instructions, and the loops that they form.

use std::collections::BTreeMap;

use super::counts::Counts;

/// One kernel of a listing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct KernelCode {
    /// The `extern "C"` name.
    pub entry: String,
    /// Instructions in the order of their addresses: the opcode with its modifiers, and whether
    /// its predicate is constantly false.
    instructions: Vec<(String, bool)>,
    /// First and last instruction of each loop, outer loops first.
    loops: Vec<(usize, usize)>,
}

/// A branch to a label.
struct Branch {
    from: usize,
    to: String,
}

/// The kernels of a listing.
pub fn kernels(listing: &str) -> Vec<KernelCode> {
    let mut found: Vec<KernelCode> = Vec::new();
    let mut labels: BTreeMap<String, usize> = BTreeMap::new();
    let (mut branches, mut ends): (Vec<Branch>, Vec<usize>) = (Vec::new(), Vec::new());
    for line in listing.lines() {
        if let Some(name) = line.strip_prefix(".text.") {
            close(found.last_mut(), &labels, (&branches, &ends));
            (labels, branches, ends) = (BTreeMap::new(), Vec::new(), Vec::new());
            found.push(KernelCode {
                entry: name.trim_end_matches(':').to_owned(),
                ..KernelCode::default()
            });
            continue;
        }
        let Some(kernel) = found.last_mut() else {
            continue;
        };
        let at = kernel.instructions.len();
        if let Some(label) = line
            .strip_suffix(':')
            .filter(|name| name.starts_with(".L_"))
        {
            labels.insert(label.to_owned(), at);
        } else if let Some((predicate, opcode, operands)) = instruction(line) {
            if predicate.is_none() && matches!(opcode, "EXIT" | "RET") {
                ends.push(at);
            }
            // BRA.U has a uniform predicate; BRA.DIV leads to code for diverged warps.
            let is_branch = matches!(opcode, "BRA" | "BRA.U");
            let target = operands
                .split_once("`(")
                .and_then(|(_, to)| to.split_once(')'));
            if let Some((to, _)) = target.filter(|_| is_branch) {
                let to = to.to_owned();
                branches.push(Branch { from: at, to });
            }
            let never = predicate == Some("@!PT");
            kernel.instructions.push((opcode.to_owned(), never));
        }
    }
    close(found.last_mut(), &labels, (&branches, &ends));
    found
}

/// Predicate, opcode and operands of a line such as `/*0040*/  @!P0 BRA `(.L_x_1) ;`.
fn instruction(line: &str) -> Option<(Option<&str>, &str, &str)> {
    let (address, rest) = line.trim_start().strip_prefix("/*")?.split_once("*/")?;
    let is_address = !address.is_empty() && address.bytes().all(|b| b.is_ascii_hexdigit());
    let rest = rest.trim_matches(|c: char| c.is_whitespace() || "{};".contains(c));
    if !is_address || rest.is_empty() {
        return None;
    }
    let (predicate, rest) = if rest.starts_with('@') {
        let (predicate, rest) = rest.split_once(char::is_whitespace)?;
        (Some(predicate), rest.trim_start())
    } else {
        (None, rest)
    };
    let (opcode, operands) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
    Some((predicate, opcode, operands))
}

/// Sets the loops of a kernel. A branch backward over an end of the kernel leads from code that the
/// compiler has moved out of the way to where it belongs; it makes no loop.
fn close(
    kernel: Option<&mut KernelCode>,
    labels: &BTreeMap<String, usize>,
    (branches, ends): (&[Branch], &[usize]),
) {
    let Some(kernel) = kernel else { return };
    let backward = branches.iter().filter_map(|branch| {
        let to = *labels.get(&branch.to)?;
        let ends_within = ends.iter().any(|end| (to..branch.from).contains(end));
        (to < branch.from && !ends_within).then_some((to, branch.from))
    });
    kernel.loops = backward.collect();
    kernel
        .loops
        .sort_by_key(|&(first, last)| (first, std::cmp::Reverse(last)));
}

impl KernelCode {
    /// The innermost loops with tensor instructions, in order: each a main loop of products.
    pub fn product_loops(&self) -> Vec<CodeLoop> {
        let of_tensor = |&&(first, last): &&(usize, usize)| self.counts(first, last).tensor() > 0;
        let with: Vec<(usize, usize)> = self.loops.iter().filter(of_tensor).copied().collect();
        let is_innermost = |&&(first, last): &&(usize, usize)| {
            !with.iter().any(|&other| is_inside(other, (first, last)))
        };
        with.iter()
            .filter(is_innermost)
            .map(|&(first, last)| self.code_loop(first, last))
            .collect()
    }

    /// Instructions on the way from the first to the last, those of loops as often as `trips` says
    /// of their depth, from 1. With `only_outside`, main loops of products are left out, and loops
    /// around them go round once.
    pub fn path(&self, only_outside: bool, trips: &dyn Fn(usize) -> f64) -> f64 {
        let products = self.product_loops();
        let products: Vec<(usize, usize)> = products
            .iter()
            .filter(|_| only_outside)
            .map(|found| (found.first, found.last))
            .collect();
        // A block has about one tile.
        let other = |at: &&(usize, usize)| {
            !products
                .iter()
                .any(|of| *of == **at || is_inside(*of, **at))
        };
        let others: Vec<(usize, usize)> = self.loops.iter().filter(other).copied().collect();
        let mut sum = 0.0;
        for at in 0..self.instructions.len() {
            if products
                .iter()
                .any(|&(first, last)| (first..=last).contains(&at))
            {
                continue;
            }
            let around = others
                .iter()
                .filter(|(first, last)| (*first..=*last).contains(&at));
            sum += (1..=around.count()).map(trips).product::<f64>();
        }
        sum
    }

    fn code_loop(&self, first: usize, last: usize) -> CodeLoop {
        let inner = self
            .loops
            .iter()
            .filter(|&&other| is_inside(other, (first, last)));
        let copies: Vec<Counts> = inner
            .map(|&(first, last)| self.counts(first, last))
            .filter(|counts| counts.ldgsts > 0)
            .collect();
        let mut once = self.counts(first, last);
        for copy in &copies {
            once = once.minus(copy);
        }
        CodeLoop {
            first,
            last,
            once,
            copies,
        }
    }

    /// Counts of the instructions from `first` to `last`.
    fn counts(&self, first: usize, last: usize) -> Counts {
        let mut counts = Counts::default();
        for (opcode, never) in &self.instructions[first..=last] {
            counts.add(opcode, *never);
        }
        counts
    }
}

fn is_inside(inner: (usize, usize), outer: (usize, usize)) -> bool {
    inner != outer && outer.0 <= inner.0 && inner.1 <= outer.1
}

/// A main loop of products.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CodeLoop {
    first: usize,
    last: usize,
    /// Instructions of one time round, without those of `copies`.
    pub once: Counts,
    /// The loops in it that copy to shared memory, each of four copies a time round.
    pub copies: Vec<Counts>,
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTING: &str = include_str!("fixture.sass");

    #[test]
    fn instructions_and_loops_of_a_listing_are_found() {
        let found = kernels(LISTING);
        assert_eq!(found.len(), 2);
        let kernel = &found[0];
        assert_eq!(kernel.entry, "products");
        assert_eq!(kernel.instructions.len(), 18);
        // The branch backward over the end makes no loop.
        assert_eq!(kernel.loops, [(1, 12), (3, 10), (4, 6), (13, 14)]);
        let products = kernel.product_loops();
        assert_eq!(products.len(), 1);
        let main = &products[0];
        assert_eq!((main.first, main.last), (3, 10));
        assert_eq!((main.once.tensor_f16, main.once.integer), (1, 1));
        assert_eq!(
            (main.once.ldsm, main.once.lds, main.once.total()),
            (1, 0, 5)
        );
        assert_eq!(main.copies.len(), 1);
        assert_eq!((main.copies[0].ldgsts, main.copies[0].total()), (1, 3));
        assert_eq!(found[1].product_loops(), []);
    }

    #[test]
    fn a_path_counts_loops_without_products_by_their_trips() {
        let kernel = &kernels(LISTING)[0];
        // 18 instructions, 8 of them in the loop of products, 2 in another loop.
        assert_eq!(kernel.path(true, &|_| 1.0), 10.0);
        assert_eq!(kernel.path(true, &|_| 3.0), 14.0);
        assert_eq!(kernel.path(false, &|_| 1.0), 18.0);
    }
}
