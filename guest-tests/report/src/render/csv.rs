// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! CSV (RFC 4180, but lines end as everywhere here): a row for each time and each count of each
//! step. What is not known is empty. Times are nanoseconds.

use crate::{Change, Comparison, Configuration, PhaseChange, Spread, Tested};

const HEAD: &str = "engine,subject,mode,backing,memory_bytes,vcpus,prefault,options,phase,metric,\
    before_median,before_q1,before_q3,before_min,before_max,before_runs,\
    after_median,after_q1,after_q3,after_min,after_max,after_runs,ratio,\
    hl_ratio,hl_low,hl_high,test,p,p_holm,delta,detectable,verdict\n";

/// The comparison as CSV.
pub fn csv(comparison: &Comparison) -> String {
    let mut out = HEAD.to_owned();
    for (configuration, phase) in comparison.rows() {
        let times = std::iter::once(("time", &phase.time));
        let counts = super::counts(phase).map(|(name, change)| (name.as_str(), change));
        for (metric, change) in times.chain(counts) {
            let judged = (metric == comparison.metric).then_some(phase);
            let fields = fields(configuration, phase, metric, change, judged);
            let fields: Vec<String> = fields.iter().map(|field| quoted(field)).collect();
            out.push_str(&fields.join(","));
            out.push('\n');
        }
    }
    out
}

fn fields(
    configuration: &Configuration,
    phase: &PhaseChange,
    metric: &str,
    change: &Change,
    judged: Option<&PhaseChange>,
) -> Vec<String> {
    let setup = &configuration.setup;
    let options = setup
        .options
        .iter()
        .map(|(name, value)| format!("{name}={value}"));
    let mut fields = vec![
        configuration.engine.clone(),
        setup.subject.clone(),
        setup.mode.clone(),
        text(setup.backing),
        text(setup.memory.map(|memory| memory.0)),
        text(setup.vcpus),
        setup.prefault.to_string(),
        options.collect::<Vec<_>>().join(" "),
        phase.phase.to_string(),
        metric.to_owned(),
    ];
    fields.extend(spread(change.before));
    fields.extend(spread(change.after));
    fields.push(text(change.ratio));
    let tested = judged.and_then(|phase| phase.tested);
    let of = |figure: fn(&Tested) -> Option<f64>| text(tested.as_ref().and_then(figure));
    fields.push(of(|tested| tested.ratio));
    fields.push(of(|tested| tested.interval.map(|[low, _]| low)));
    fields.push(of(|tested| tested.interval.map(|[_, high]| high)));
    fields.push(text(tested.map(|tested| tested.test)));
    fields.push(of(|tested| Some(tested.p)));
    fields.push(of(|tested| Some(tested.p_holm)));
    fields.push(of(|tested| Some(tested.delta)));
    fields.push(of(|tested| tested.detectable));
    fields.push(text(
        judged
            .and_then(|phase| phase.verdict)
            .map(|verdict| verdict.name()),
    ));
    fields
}

fn spread(spread: Option<Spread>) -> [String; 6] {
    let of = |figure: fn(Spread) -> f64| text(spread.map(figure));
    [
        of(|s| s.median),
        of(|s| s.q1),
        of(|s| s.q3),
        of(|s| s.min),
        of(|s| s.max),
        text(spread.map(|s| s.runs)),
    ]
}

fn text(value: Option<impl ToString>) -> String {
    value.map_or_else(String::new, |value| value.to_string())
}

/// A field that holds what separates fields stands in quotes.
fn quoted(field: &str) -> String {
    if field.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", field.replace('"', "\"\""))
    } else {
        field.to_owned()
    }
}
