<powershell>
Write-Host a
</powershell>
<persist>true</persist>
