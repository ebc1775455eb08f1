// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Charts of plain figures: a lane for each thing, in it a bar for each of what it was measured on.

use super::svg::{Anchor, Svg, WIDTH, figure};

const LEFT: f64 = 8.0;
const ROOM: f64 = WIDTH - 2.0 * LEFT;

/// One thing and its bars.
#[derive(Debug, Clone)]
pub struct Lane {
    /// What it is called.
    pub name: String,
    /// How long each bar is, and what stands above it.
    pub bars: Vec<(f64, String)>,
}

/// The chart of some lanes, all bars to one scale; `None` where there is nothing to be seen.
pub fn bars(title: &str, words: &str, lanes: &[Lane]) -> Option<String> {
    let values = || {
        lanes
            .iter()
            .flat_map(|lane| lane.bars.iter().map(|(value, _)| *value))
    };
    let greatest = values().fold(0.0, f64::max);
    if greatest <= 0.0 {
        return None;
    }
    let mut svg = Svg::default();
    for lane in lanes {
        svg.text(LEFT, svg.height + 12.0, Anchor::Start, "", &lane.name);
        svg.height += 16.0;
        for (at, (value, told)) in lane.bars.iter().enumerate() {
            // The first and the last are before and after; those between have colours of their own.
            let class = match at {
                at if at + 1 == lane.bars.len() => "after".to_owned(),
                0 => "before".to_owned(),
                at => format!("p{}", at % 8),
            };
            svg.text(LEFT, svg.height + 11.0, Anchor::Start, "soft", told);
            let width = (value / greatest * ROOM).max(0.5);
            svg.rect([LEFT, svg.height + 16.0, width, 6.0], &class, Some(told));
            svg.height += 25.0;
        }
        svg.height += 8.0;
    }
    Some(figure(title, words, svg))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bar_is_a_mark_with_its_figure() {
        let lane = |name: &str, values: &[f64]| Lane {
            name: name.to_owned(),
            bars: values.iter().map(|v| (*v, format!("told {v}"))).collect(),
        };
        let chart = bars(
            "title",
            "ms",
            &[lane("a", &[4.0, 2.0, 1.0]), lane("b", &[0.0])],
        )
        .unwrap();

        assert!(chart.contains("data-marks=\"4\"") && chart.contains("told 2"));
        assert!(chart.contains("width=\"344.0\"") && chart.contains("width=\"86.0\""));
        assert_eq!(bars("title", "", &[lane("a", &[0.0])]), None);
        assert_eq!(bars("title", "", &[]), None);
    }
}
