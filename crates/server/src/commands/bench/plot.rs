//! A plot as SVG: panels beside each other, each with curves over a common horizontal axis.

use std::fmt::Write;

const WIDTH: f64 = 440.0;
const HEIGHT: f64 = 280.0;
/// Space around the axes of a panel.
const LEFT: f64 = 70.0;
const TOP: f64 = 60.0;
const PANEL: f64 = WIDTH + LEFT + 30.0;
/// Colours that readers with common colour blindness can tell apart.
const COLORS: [&str; 6] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00",
];
/// Lines across a panel.
const TICKS: usize = 5;

/// A curve: its points as (x, y), in the order of x.
pub(super) struct Curve {
    pub(super) name: String,
    pub(super) points: Vec<(f64, f64)>,
}

/// Curves over `x_unit`, from 0 to the end of the axis.
pub(super) struct Panel<'a> {
    /// The name, with the unit of y.
    pub(super) name: &'a str,
    pub(super) x_unit: &'a str,
    pub(super) x_end: f64,
    pub(super) curves: Vec<Curve>,
}

/// The plot.
pub(super) fn svg(title: &str, panels: &[Panel]) -> String {
    let (width, height) = (PANEL * panels.len() as f64 + 10.0, HEIGHT + TOP + 60.0);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <title>{0}</title>\n<rect width=\"{width}\" height=\"{height}\" fill=\"white\"/>\n\
         <text x=\"{LEFT}\" y=\"22\" font-size=\"15\">{0}</text>\n",
        escaped(title)
    );
    for (index, panel) in panels.iter().enumerate() {
        add_panel(&mut out, PANEL * index as f64 + LEFT, panel);
    }
    out.push_str("</svg>\n");
    out
}

fn add_panel(out: &mut String, left: f64, panel: &Panel) {
    let points = panel.curves.iter().flat_map(|curve| &curve.points);
    let top = round_up(points.fold(0.0, |most, (_, y)| y.max(most)));
    let bottom = TOP + HEIGHT;
    // Writing to a string does not fail.
    let _ = writeln!(
        out,
        "<text x=\"{left}\" y=\"{}\">{}</text>",
        TOP - 12.0,
        escaped(panel.name)
    );
    for tick in 0..=TICKS {
        let share = tick as f64 / TICKS as f64;
        let (x, y) = (left + WIDTH * share, bottom - HEIGHT * share);
        let _ = writeln!(
            out,
            "<line x1=\"{left}\" y1=\"{y}\" x2=\"{}\" y2=\"{y}\" stroke=\"#ddd\"/>\
             <text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>\
             <text x=\"{x}\" y=\"{}\" text-anchor=\"middle\">{:.0} {}</text>",
            left + WIDTH,
            left - 8.0,
            y + 4.0,
            (top * share * 100.0).round() / 100.0,
            bottom + 18.0,
            panel.x_end * share,
            panel.x_unit,
        );
    }
    for (index, curve) in panel.curves.iter().enumerate() {
        let color = COLORS[index % COLORS.len()];
        let points = curve.points.iter().map(|(x, y)| {
            let x = left + WIDTH * x / panel.x_end;
            format!("{x:.1},{:.1}", bottom - HEIGHT * y / top)
        });
        let points: Vec<String> = points.collect();
        let _ = writeln!(
            out,
            "<polyline fill=\"none\" stroke=\"{color}\" stroke-width=\"2\" points=\"{}\"/>\
             <text x=\"{}\" y=\"{}\" fill=\"{color}\">{}</text>",
            points.join(" "),
            left + 10.0,
            TOP + 16.0 * (index + 1) as f64,
            escaped(&curve.name),
        );
    }
}

/// The next number of the form 1, 2 or 5 times a power of ten.
pub(super) fn round_up(value: f64) -> f64 {
    if value <= 0.0 {
        return 1.0;
    }
    let power = 10_f64.powf(value.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * power);
    let above = steps.into_iter().find(|step| *step >= value);
    above.unwrap_or(10.0 * power)
}

fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    text.replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plot_has_every_curve_and_no_markup_of_names() {
        let curve = |name: &str, points: &[(f64, f64)]| Curve {
            name: name.to_owned(),
            points: points.to_vec(),
        };
        let panel = Panel {
            name: "first (ms)",
            x_unit: "%",
            x_end: 100.0,
            curves: vec![
                curve("1 <b>", &[(0.0, 1.0), (100.0, 3.0)]),
                curve("none", &[]),
            ],
        };
        let svg = svg("a & b", &[panel]);
        assert_eq!(svg.matches("<polyline").count(), 2);
        assert!(
            svg.contains("a &amp; b") && svg.contains("1 &lt;b&gt;"),
            "{svg}"
        );
        // The highest value is 3 of 5.
        assert!(svg.contains("510.0,172.0"), "{svg}");
        assert_eq!(
            [0.0, 0.03, 1.0, 7.0, 20.0].map(round_up),
            [1.0, 0.05, 1.0, 10.0, 20.0]
        );
    }
}
