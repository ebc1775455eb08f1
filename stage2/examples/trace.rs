// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Checks or shrinks a trace file: `cargo run -p granule-stage2 --example trace -- COMMAND FILE`.
//!
//! `check` prints the violations; `shrink` prints a minimal trace that still violates the first
//! rule. Exit codes: 0 success, 1 a rule is violated, 2 wrong usage or unusable input.

use std::process::ExitCode;

use granule_stage2::check::Trace;

fn run(command: &str, file: &str) -> Result<ExitCode, Box<dyn std::error::Error>> {
    let text = std::fs::read_to_string(file).map_err(|error| format!("{file}: {error}"))?;
    let trace: Trace = text.parse().map_err(|error| format!("{file}: {error}"))?;
    let checker = trace.replay();
    let first = checker.violations().first();
    match (command, first) {
        ("check", None) => println!("{} events violate no rule", trace.events.len()),
        ("check", Some(_)) => {
            checker.violations().iter().for_each(|v| println!("{v}"));
            return Ok(ExitCode::from(1));
        }
        ("shrink", Some(violation)) => print!("{}", trace.shrink(violation.rule)),
        ("shrink", None) => return Err(format!("{file}: violates no rule").into()),
        _ => return Err(format!("unknown command '{command}'; expected check or shrink").into()),
    }
    Ok(ExitCode::SUCCESS)
}

fn main() -> ExitCode {
    let args: Vec<_> = std::env::args().skip(1).collect();
    let result = match &args[..] {
        [command, file] => run(command, file),
        _ => Err("usage: trace check|shrink FILE".into()),
    };
    result.unwrap_or_else(|error| {
        eprintln!("trace: {error}");
        ExitCode::from(2)
    })
}
