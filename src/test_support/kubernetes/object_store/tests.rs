use super::*;

fn store(finalizers: &[&str]) -> (Store, Key) {
    let (mut store, key) = (Store::default(), Key::new("nodes", "", "n"));
    store.put(
        key.clone(),
        json!({"metadata": {"name": "n", "finalizers": finalizers}, "spec": {"taints": []}, "status": {"a": 1}}),
    );
    (store, key)
}

#[test]
fn a_write_with_an_old_resource_version_is_a_conflict() {
    let (mut store, key) = store(&[]);
    let old = store.get(&key).unwrap();
    let label = |version: &Value| json!({"metadata": {"resourceVersion": version, "labels": {"a": "b"}}});
    store.patch(&key, "", Patch::Merge(label(&old["metadata"]["resourceVersion"]))).unwrap();
    let again = store.patch(&key, "", Patch::Merge(label(&old["metadata"]["resourceVersion"])));
    assert_eq!(again.unwrap_err().code, 409);
    assert_eq!(store.replace(&key, "", old).unwrap_err().code, 409);
    let before = store.get(&key).unwrap();
    let unchanged = store.patch(&key, "", Patch::Merge(json!({"metadata": {"labels": {"a": "b"}}}))).unwrap();
    assert_eq!(unchanged, before, "a write without a change keeps the resource version");
}

#[test]
fn a_status_is_written_through_its_subresource_only() {
    let (mut store, key) = store(&[]);
    let both = json!({"metadata": {"labels": {"a": "b"}}, "status": {"a": 2}});
    let main = store.patch(&key, "", Patch::Merge(both.clone())).unwrap();
    assert_eq!((&main["metadata"]["labels"]["a"], &main["status"]["a"]), (&json!("b"), &json!(1)));
    let (mut store, key) = self::store(&[]);
    let status = store.patch(&key, "status", Patch::Merge(both)).unwrap();
    assert_eq!((&status["metadata"]["labels"], &status["status"]["a"]), (&Value::Null, &json!(2)));
}

#[test]
fn an_object_stays_until_its_last_finalizer_is_removed() {
    let (mut store, key) = store(&["a", "b"]);
    let wrong = store.delete(&key, &json!({"preconditions": {"uid": "other"}}));
    assert_eq!(wrong.unwrap_err().code, 409);
    assert!(is_deleting(&store.delete(&key, &json!({"preconditions": {"uid": "uid-n"}})).unwrap()));
    let finalizers = |list: Value| Patch::Merge(json!({"metadata": {"finalizers": list}}));
    assert_eq!(store.patch(&key, "", finalizers(json!(["a", "b", "c"]))).unwrap_err().code, 422);
    store.patch(&key, "", finalizers(json!(["b"]))).unwrap();
    store.get(&key).unwrap();
    store.patch(&key, "", finalizers(json!([]))).unwrap();
    assert_eq!(store.get(&key).unwrap_err().code, 404);
}

#[test]
fn a_bound_pod_is_deleted_when_its_grace_period_ends() {
    let (mut store, key) = (Store::default(), Key::new("pods", "n", "a"));
    store.put(key.clone(), json!({"metadata": {"name": "a", "namespace": "n"}, "spec": {"nodeName": "x"}}));
    let end = |store: &Store| {
        let object = store.get(&key).unwrap();
        object["metadata"]["deletionTimestamp"].as_str().unwrap().parse::<Timestamp>().unwrap()
    };
    store.evict(&key, &json!({})).unwrap();
    let first = end(&store);
    store.delete(&key, &json!({"gracePeriodSeconds": 60})).unwrap();
    assert_eq!(end(&store), first, "a grace period is never extended");
    store.delete(&key, &json!({"gracePeriodSeconds": 1})).unwrap();
    assert!(end(&store) < first);
}

#[test]
fn generated_names_are_unique() {
    let mut store = Store::default();
    let key = Key::new("nodeclaims", "", "");
    let named = |store: &mut Store, meta: Value| store.create(key.clone(), json!({ "metadata": meta }));
    let name = |object: Value| object["metadata"]["name"].as_str().unwrap().to_owned();
    assert_eq!(name(named(&mut store, json!({"generateName": "p-"})).unwrap()), "p-1");
    assert_eq!(name(named(&mut store, json!({"generateName": "p-"})).unwrap()), "p-2");
    assert_eq!(named(&mut store, json!({"name": "p-2"})).unwrap_err().reason, "AlreadyExists");
}
