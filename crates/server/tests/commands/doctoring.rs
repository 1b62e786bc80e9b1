//! Tests of `hearth doctor`.

use std::net::TcpListener;

use serde_json::Value;

use crate::process::{hearth, model};

#[test]
fn doctor_plans_the_model_of_the_flags_and_names_the_machine() {
    let model = model();
    let path = model.to_str().unwrap();
    let done = hearth(&[
        "doctor",
        path,
        "--device",
        "cpu",
        "--port",
        "0",
        "--max-ctx",
        "512",
    ]);
    assert_eq!(done.code, Some(0), "{}{}", done.out, done.err);
    let first = done.out.lines().next().unwrap();
    assert!(
        first.starts_with("hearth   ") && first.contains("debug build"),
        "{first}"
    );
    for part in [
        "\nsystem ",
        "\nok       port",
        "sequences of up to 512",
        "nothing stops serving",
    ] {
        assert!(done.out.contains(part), "{part}: {}", done.out);
    }
}

#[test]
fn problems_are_findings_with_place_and_action_and_exit_with_1() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    // The program that has the port answers nothing.
    let silent = std::thread::spawn(move || drop(listener.accept()));
    let args = [
        "doctor",
        "/no/such.gguf",
        "--device",
        "cpu",
        "--json",
        "--port",
        &port,
    ];
    let done = hearth(&args);
    silent.join().unwrap();
    assert_eq!(done.code, Some(1), "{}", done.err);
    assert!(done.err.contains("2 problems stop serving"), "{}", done.err);
    let report: Value = serde_json::from_str(&done.out).unwrap();
    assert_eq!(report["can_serve"], false);
    assert!(report["machine"]["hearth"].is_string(), "{report}");
    let problems: Vec<&Value> = report["findings"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|finding| finding["severity"] == "problem")
        .collect();
    let checks: Vec<&Value> = problems.iter().map(|problem| &problem["check"]).collect();
    assert_eq!(checks, ["port", "model"]);
    for problem in problems {
        assert!(
            problem["where"].is_string() && problem["do"].is_string(),
            "{problem}"
        );
    }
}
