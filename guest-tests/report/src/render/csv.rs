// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! CSV (RFC 4180 with line feeds): a row for each time and count of each step. Unknown fields are
//! empty; times are nanoseconds.

use super::columns::{COLUMNS, rows};
use crate::comparison::{Comparison, Configuration};

/// Names of the fields before those of [`COLUMNS`].
const HEAD: [&str; 10] = [
    "engine",
    "subject",
    "mode",
    "backing",
    "memory_bytes",
    "vcpus",
    "prefault",
    "options",
    "phase",
    "metric",
];

/// Renders a comparison as CSV.
pub fn csv(comparison: &Comparison) -> String {
    let fields = || COLUMNS.iter().flat_map(|column| column.csv);
    let mut out = String::new();
    push_line(&mut out, HEAD.into_iter().chain(fields().map(|(name, _)| *name)));
    for (configuration, phase) in comparison.rows() {
        for row in rows(comparison, phase) {
            let mut line = setup_fields(configuration);
            line.extend([phase.phase.to_string(), row.metric.to_owned()]);
            line.extend(fields().map(|(_, value)| value(&row).unwrap_or_default()));
            push_line(&mut out, line.iter().map(String::as_str));
        }
    }
    out
}

fn setup_fields(configuration: &Configuration) -> Vec<String> {
    let setup = &configuration.setup;
    let options = setup.options.iter().map(|(name, value)| format!("{name}={value}"));
    vec![
        configuration.engine.clone(),
        setup.subject.clone(),
        setup.mode.clone(),
        setup.backing.map(|backing| backing.to_string()).unwrap_or_default(),
        setup.memory.map(|memory| memory.0.to_string()).unwrap_or_default(),
        setup.vcpus.map(|vcpus| vcpus.to_string()).unwrap_or_default(),
        setup.prefault.to_string(),
        options.collect::<Vec<_>>().join(" "),
    ]
}

/// Writes a line; quotes a field that contains a separator.
fn push_line<'a>(out: &mut String, fields: impl Iterator<Item = &'a str>) {
    let quoted = fields.map(|field| {
        if field.contains([',', '"', '\n', '\r']) {
            format!("\"{}\"", field.replace('"', "\"\""))
        } else {
            field.to_owned()
        }
    });
    out.push_str(&quoted.collect::<Vec<_>>().join(","));
    out.push('\n');
}
