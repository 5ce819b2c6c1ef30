package config

import (
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"

	"prefixgate/internal/testenv"
)

// keys appends the path of every key below t. An element of a list is written as key[].
func keys(dst []string, prefix string, t reflect.Type) []string {
	switch t.Kind() {
	case reflect.Pointer:
		return keys(dst, prefix, t.Elem())
	case reflect.Slice:
		if t.Elem().Kind() == reflect.Struct {
			return keys(dst, prefix+"[]", t.Elem())
		}
	case reflect.Struct:
		if t == reflect.TypeFor[time.Time]() {
			break
		}
		for f := range t.Fields() {
			name, _, _ := strings.Cut(f.Tag.Get("yaml"), ",")
			if name == "-" || !f.IsExported() {
				continue
			}
			path := name
			if prefix != "" {
				path = prefix + "." + name
			}
			dst = keys(dst, path, f.Type)
		}
		return dst
	}
	return append(dst, prefix)
}

// Every key is in docs/configuration.md with its default, and nothing is there that does not exist.
func TestKeysAreDocumented(t *testing.T) {
	doc, err := os.ReadFile(filepath.Join(testenv.Root(), "docs", "configuration.md"))
	if err != nil {
		t.Fatal(err)
	}
	documented := map[string]string{}
	row := regexp.MustCompile("(?m)^\\| `([a-z0-9_.\\[\\]]+)` \\| ([^|]*) \\| (.*) \\|$")
	for _, m := range row.FindAllStringSubmatch(string(doc), -1) {
		if _, twice := documented[m[1]]; twice {
			t.Errorf("docs/configuration.md has %s twice", m[1])
		}
		documented[m[1]] = m[2]
		if strings.TrimSpace(m[2]) == "" {
			t.Errorf("docs/configuration.md gives no default of %s", m[1])
		}
		if strings.TrimSpace(m[3]) == "" {
			t.Errorf("docs/configuration.md says nothing about %s", m[1])
		}
	}
	known := map[string]bool{}
	for _, key := range keys(nil, "", reflect.TypeFor[Config]()) {
		if strings.HasSuffix(key, ".") || strings.Contains(key, "..") {
			t.Errorf("key %q: a field has no yaml tag", key)
		}
		known[key] = true
		if _, ok := documented[key]; !ok {
			t.Errorf("docs/configuration.md lacks %s", key)
		}
	}
	for key := range documented {
		if !known[key] {
			t.Errorf("docs/configuration.md has %s, which is no key", key)
		}
	}
	if len(known) < 100 {
		t.Errorf("found %d keys, want all of them", len(known))
	}
}
