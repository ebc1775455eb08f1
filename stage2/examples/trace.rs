// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Looks at a trace in a file: `cargo run -p granule-stage2 --example trace -- check FILE` says which
//! rules it breaks, `shrink FILE` prints the shortest one that breaks the first of them, `casemate
//! FILE` prints it as casemate reads it. Exit codes: 0 done, 1 a rule is broken, 2 wrong use.

use std::process::ExitCode;

use granule_stage2::check::Trace;

fn run(command: &str, file: &str) -> Result<ExitCode, Box<dyn std::error::Error>> {
    let trace: Trace = std::fs::read_to_string(file)?.parse()?;
    let checker = trace.replay();
    let first = checker.violations().first();
    match (command, first) {
        ("check", None) => println!("{} events break no rule", trace.events.len()),
        ("check", Some(_)) => {
            checker.violations().iter().for_each(|v| println!("{v}"));
            return Ok(ExitCode::from(1));
        }
        ("shrink", Some(violation)) => print!("{}", trace.shrink(violation.rule)),
        ("shrink", None) => return Err("it breaks no rule".into()),
        ("casemate", _) => {
            let casemate = trace.casemate();
            print!("{}", casemate.text);
            eprintln!("left out: {:?}", casemate.left_out);
        }
        _ => return Err("no such command: use check, shrink or casemate".into()),
    }
    Ok(ExitCode::SUCCESS)
}

fn main() -> ExitCode {
    let args: Vec<_> = std::env::args().skip(1).collect();
    let result = match &args[..] {
        [command, file] => run(command, file),
        _ => Err("use: trace check|shrink|casemate FILE".into()),
    };
    result.unwrap_or_else(|error| {
        eprintln!("trace: {error}");
        ExitCode::from(2)
    })
}
