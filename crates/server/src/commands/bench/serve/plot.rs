//! A plot of percentiles as SVG: one panel per distribution, one curve per load.

use std::fmt::Write;

use super::percentiles::Percentiles;

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

/// The values of one load.
pub(super) struct Curve {
    pub(super) name: String,
    pub(super) values: Percentiles,
}

/// The plot; each panel has a name, and milliseconds over percent of the values.
pub(super) fn svg(title: &str, panels: &[(&str, Vec<Curve>)]) -> String {
    let (width, height) = (PANEL * panels.len() as f64 + 10.0, HEIGHT + TOP + 60.0);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <title>{0}</title>\n<rect width=\"{width}\" height=\"{height}\" fill=\"white\"/>\n\
         <text x=\"{LEFT}\" y=\"22\" font-size=\"15\">{0}</text>\n",
        escaped(title)
    );
    for (index, (name, curves)) in panels.iter().enumerate() {
        panel(&mut out, PANEL * index as f64 + LEFT, name, curves);
    }
    out.push_str("</svg>\n");
    out
}

fn panel(out: &mut String, left: f64, name: &str, curves: &[Curve]) {
    let highest = curves.iter().filter_map(|curve| curve.values.at(100.0));
    let top = round_up(highest.fold(0.0, f64::max));
    let bottom = TOP + HEIGHT;
    // Writing to a string does not fail.
    let _ = writeln!(
        out,
        "<text x=\"{left}\" y=\"{}\">{} (ms)</text>",
        TOP - 12.0,
        escaped(name)
    );
    for tick in 0..=TICKS {
        let share = tick as f64 / TICKS as f64;
        let (x, y) = (left + WIDTH * share, bottom - HEIGHT * share);
        let _ = writeln!(
            out,
            "<line x1=\"{left}\" y1=\"{y}\" x2=\"{}\" y2=\"{y}\" stroke=\"#ddd\"/>\
             <text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>\
             <text x=\"{x}\" y=\"{}\" text-anchor=\"middle\">{:.0} %</text>",
            left + WIDTH,
            left - 8.0,
            y + 4.0,
            (top * share * 100.0).round() / 100.0,
            bottom + 18.0,
            share * 100.0,
        );
    }
    for (index, curve) in curves.iter().enumerate() {
        let color = COLORS[index % COLORS.len()];
        let points = (0..=100).filter_map(|percent| {
            let value = curve.values.at(f64::from(percent))?;
            let x = left + WIDTH * f64::from(percent) / 100.0;
            Some(format!("{x:.1},{:.1}", bottom - HEIGHT * value / top))
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
fn round_up(value: f64) -> f64 {
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
    fn plot_has_a_curve_per_load_and_no_markup_of_names() {
        let curve = |name: &str, values: &[f64]| Curve {
            name: name.to_owned(),
            values: Percentiles::new(values.to_vec()),
        };
        let curves = vec![curve("1 <b>", &[1.0, 3.0]), curve("none", &[])];
        let svg = svg("a & b", &[("first", curves)]);
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
